"""Wrong conjugate operators: what enters and leaves a parallel region, forward and backward (bugs.md 6b)."""

from __future__ import annotations

from suites.mutants.mutant import SPLIT, TENSOR, WHOLE, Change, Mutant, everywhere

__all__ = ["BOUNDARIES"]

_LEAVE = "return pairs.reduce_from(y, self.axis)"
_LEAVE_SPLIT = "return pairs.reduce_scatter_to_sequence(y, self.axis, dim=self.sequence_dim)"
_HEAD = "logits = column_linear(x, weight, None, self.region)"
_ALL_REDUCE = (
    "return start_all_reduce(x.clone(memory_format=torch.contiguous_format), axis, op=op, overlap=False).wait()"
)
_GATHERED_PARTS = "grad[..., first : first + widths[axis.rank]].contiguous()"
_GATHER_LOGITS = "logits = pairs.gather_from(logits, self.region.axis)[..., : self.vocab]"
_GATHER_TOKENS = "(logits, self.sequence, dim=_SEQUENCE, tensor_parallel_output_grad=False)"
_GATHER_LOSSES = "(losses, sequence, dim=_SEQUENCE, tensor_parallel_output_grad=False)"
_GATHER_COLUMNS = "pairs.gather_from(columns, self.region.axis)"
_LOSS_SLOPE = "return (slope * grad[..., None]).to(ctx.dtype)"
_FIRST_SUM = "embedding|layers.0.attention.wo"
_HIDDEN = {"mtp": "embedding=hidden", "msp": "embedding=hidden", "fsp": "embedding=hidden"}


def _linear(old: str, new: str) -> Change:
    return Change(module="parallel.layers.linear", old=old, new=new)


BOUNDARIES = (
    Mutant(
        name="column-input-gradient-not-reduced",
        stands_for="B-12: torchtitan #1878, an input's gradient is a partial sum and nothing reduced it",
        modes=everywhere("", WHOLE),
        changes=(
            _linear("return start_all_reduce(grad, self.axis, overlap=overlap)", "return Pending(None, lambda: grad)"),
        ),
        kills="activation_gradients|replicas",
        phase="backward",
        region="head",
        cause="missing_call|not_summed",
    ),
    Mutant(
        name="partial-gradient-taken-for-whole",
        stands_for="B-24: PyTorch #172932, the gradient of a Partial is treated as Replicate at a boundary",
        modes=everywhere("", SPLIT),
        changes=(
            _linear(
                "return start_reduce_scatter(grad, self.axis, dim=self.sequence_dim, overlap=overlap)",
                "return Pending(None, lambda: pairs.own_slice(grad, self.axis, dim=self.sequence_dim))",
            ),
        ),
        kills="activation_gradients",
        phase="backward",
        region="head",
        cause="missing_call",
    ),
    Mutant(
        name="row-output-not-reduced",
        stands_for="bugs.md 7-2: the reduction of a row-parallel output dropped; TTrace's list of tensor-parallel bugs",
        modes=everywhere("", TENSOR),
        changes=(
            _linear(_LEAVE, "return y"),
            _linear(_LEAVE_SPLIT, "return pairs.scatter_to_sequence(y, self.axis, dim=self.sequence_dim)"),
        ),
        kills="activations|replicas",
        phase="forward",
        region=_FIRST_SUM,
        cause="missing_call|not_summed",
    ),
    Mutant(
        name="row-output-reduced-twice",
        stands_for="B-22: TE 5612ba784, an all-reduce too many in a row-parallel output",
        modes=everywhere("", TENSOR),
        changes=(
            _linear(_LEAVE, _LEAVE.replace("(y,", "(pairs.reduce_from(y, self.axis),")),
            _linear(_LEAVE_SPLIT, _LEAVE_SPLIT.replace("(y,", "(pairs.reduce_from(y, self.axis),")),
        ),
        kills="activations",
        phase="forward",
        region=_FIRST_SUM,
        cause="extra_call|summed_twice",
    ),
    Mutant(
        name="reduction-of-a-copy-discarded",
        stands_for="B-21: Megatron #5338, a non-contiguous tensor was reduced in a copy and returned unreduced",
        modes={"tp": "positions=rope batch>1 packed=false"},
        changes=(
            Change(
                module="parallel.communication.collectives",
                old=_ALL_REDUCE,
                new="dist.all_reduce(x.contiguous(), _REDUCE_OPS[op], axis.group)\n    return x",
            ),
        ),
        kills="replicas",
        phase="forward",
        region="embedding",
        cause="not_summed",
    ),
    Mutant(
        name="loss-gradient-on-one-shard-only",
        stands_for="B-23: ms-swift #9947, a raw all-reduce in the loss leaves the other shards without gradient",
        modes=everywhere("head=parallel", TENSOR) | {"isp": "head=exchange"},
        changes=(
            Change(
                module="parallel.layers.loss",
                old=_LOSS_SLOPE,
                new=_LOSS_SLOPE.replace("slope *", "slope * (~elsewhere)[..., None] *"),
            ),
        ),
        kills="activation_gradients",
        phase="backward",
        region="head|",
        cause="own_labels",
    ),
    Mutant(
        name="conjugate-skipped-on-a-fast-path",
        stands_for="B-25: PyTorch PR #121653, an early return skipped the redistribution of the gradient",
        modes={"tp-sp": "positions=learned", "msp": "embedding=hidden", "fsp": "embedding=hidden"},
        changes=(
            Change(
                module="parallel.layers.embedding",
                old="return pairs.scatter_to_sequence(x, self.region.axis, dim=self.region.sequence_dim)",
                new="return pairs.own_slice(x, self.region.axis, dim=self.region.sequence_dim)",
            ),
        ),
        kills="ledger",
        phase="backward",
        region="embedding",
        cause="missing_call",
    ),
    Mutant(
        name="bias-added-before-the-sum",
        stands_for="B-30, B-26: torchtitan #4245, a bias added on every rank before the partial sums meet",
        modes=everywhere("", TENSOR),
        condition="bias=true",
        changes=(
            _linear(
                "y = self.region.leave(product(x, self.weight))",
                "y = self.region.leave(functional.linear(x, self.weight, self.bias))",
            ),
            _linear("return y if self.bias is None else y + self.bias", "return y"),
        ),
        kills="activations",
        phase="forward",
        region="layers.0.attention.wo",
        cause="bias_per_rank",
    ),
    Mutant(
        name="bias-added-by-the-caller",
        stands_for="B-30: who adds the bias (Megatron's skip_bias_add): a module does not return what its name says",
        modes=everywhere("", TENSOR),
        condition="bias=true",
        changes=(
            _linear("return y if self.bias is None else y + self.bias", "return y"),
            Change(
                module="parallel.layers.attention",
                old="y: Tensor = self.wo(context)",
                new="y: Tensor = self.wo(context) + self.wo.bias",
            ),
            Change(
                module="parallel.layers.mlp",
                old="y: Tensor = self.w2(self._activated(x))",
                new="y: Tensor = self.w2(self._activated(x)) + self.w2.bias",
            ),
        ),
        kills="activations",
        alone=True,
        phase="forward",
        region="layers.0.attention.wo",
        cause="bias_missing",
    ),
    Mutant(
        name="norm-computed-twice",
        stands_for="B-83: torchtitan #3174, one result computed twice: each copy gets half of the gradient",
        modes=everywhere(),
        changes=(
            Change(
                module="parallel.model.transformer",
                old="self.attention(self.attention_norm(x),",
                new="self.attention((self.attention_norm(x) + self.attention_norm(x)) / 2,",
            ),
        ),
        kills="activation_gradients",
        alone=True,
        phase="backward",
        region="layers.*",
        cause="constant_factor",
    ),
    Mutant(
        name="head-gradient-not-reduced",
        stands_for="B-28: apple ml-cross-entropy #42, the loss leaves its input's gradient unreduced, the caller too",
        modes=everywhere("", TENSOR),
        changes=(
            Change(
                module="parallel.layers.embedding",
                old=_HEAD,
                new="whole = x if self.region.sequence_dim is None else pairs.gather_from_sequence(x, "
                "self.region.axis, dim=self.region.sequence_dim, tensor_parallel_output_grad=False)\n"
                "        logits = functional.linear(whole, weight)",
            ),
        ),
        kills="ledger",
        phase="backward",
        region="head",
        cause="missing_call|not_summed",
    ),
    Mutant(
        name="gathered-logits-gradient-summed",
        stands_for="B-29: torchtitan #3827, logits gathered for a replicated loss, whose equal gradients are summed",
        modes=everywhere("head=gather") | {"autotp": "head=gather tied=false"},
        changes=(
            Change(
                module="parallel.layers.embedding",
                old=_GATHER_LOGITS,
                new=_GATHER_LOGITS.replace("gather_from", "all_gather_last_dim"),
            ),
            Change(
                module="parallel.communication.pairs",
                old=_GATHERED_PARTS,
                new=f"all_reduce(grad, axis){_GATHERED_PARTS[4:]}",
            ),
            Change(module="parallel.weights.tables", old=_GATHER_TOKENS, new="(logits, self.sequence, dim=_SEQUENCE)"),
        ),
        kills="parameter_gradients",
        phase="backward",
        region="head",
        cause="summed_twice|extra_call",
    ),
    Mutant(
        name="loss-sent-back-once-a-rank",
        stands_for="B-29: the same at the gather of per-token losses; modes.md 3.4, InternEvo's doc-era loss",
        modes={"isp": "head=local"},
        changes=(
            Change(
                module="parallel.schemes.weight_parallel", old=_GATHER_LOSSES, new="(losses, sequence, dim=_SEQUENCE)"
            ),
        ),
        kills="parameter_gradients",
        phase="backward",
        region="",
        cause="summed_twice|extra_call",
    ),
    Mutant(
        name="head-copies-where-it-must-gather",
        stands_for="B-29c, B-72: gpt-neox 28a5a62c, InternEvo 0f34a71, half of the model does not know of the split",
        modes=everywhere("", SPLIT),
        changes=(
            Change(
                module="parallel.layers.embedding",
                old=_HEAD,
                new="logits = functional.linear(pairs.copy_to(x, self.region.axis), weight)",
            ),
        ),
        kills="run",
        cause="raised",
    ),
    Mutant(
        name="embedding-columns-gradient-summed",
        stands_for="B-29 at the embedding: a gather whose backward reduce-scatters equal gradients",
        modes=_HIDDEN,
        changes=(
            Change(
                module="parallel.layers.embedding",
                old=_GATHER_COLUMNS,
                new=_GATHER_COLUMNS.replace("gather_from", "all_gather_last_dim"),
            ),
        ),
        kills="parameter_gradients",
        phase="backward",
        region="embedding|embedding.tokens",
        cause="summed_twice|extra_call",
    ),
    Mutant(
        name="frozen-weight-keeps-its-gradient",
        stands_for="B-15: Megatron 5fffdfc737, a frozen column-parallel weight returned an unreduced input gradient",
        modes=everywhere("", TENSOR),
        changes=(_linear("        if wants_x:\n", "        if wants_x and wants_weight:\n"),),
        equivalent="No word of a case freezes a weight: every parameter of the model is trained, so wants_weight is "
        "true in every call and the two conditions agree. Who calls `column_linear` with a frozen weight is held by "
        "tests/parallel/layers/test_parallel_linear.py.",
    ),
)
