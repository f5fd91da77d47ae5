"""Shares that differ between ranks, whole tables and whole logits: what only the mode autotp does (experts.md 27, 28).

They are mutants of the families of layouts, boundaries and reductions, which other modes fill as well.
"""

from __future__ import annotations

from suites.mutants.mutant import Change, Mutant

__all__ = ["UNEVEN_BOUNDARIES", "UNEVEN_LAYOUTS", "UNEVEN_REDUCTIONS"]

_OWN_WEIGHT = "pairs.own_part(tied_weight, axis, own) if self.weight is None"
_SUMMED = "return pairs.reduce_from(functional.linear(pairs.own_part(x, axis, own), weight), axis)"
_HALVES = "beside(in_turn(_inner(case)), in_turn(_inner(case), first=case.ffn))"
_COMPLETED = "whole[..., part.start : part.stop] = own"
_TRIMMED = "torch.cat([part[..., :width] for part, width in zip(parts, widths, strict=True)], -1)"


def _change(module: str, old: str, new: str) -> tuple[Change, ...]:
    return (Change(module=f"parallel.{module}", old=old, new=new),)


UNEVEN_LAYOUTS = (
    Mutant(
        name="gate-and-up-cut-as-one-block",
        stands_for="B-54: gate and up cut as one; DeepSpeed cuts each half of gate_up_proj by itself",
        modes={"autotp": "fuse_mlp=true"},
        changes=_change("schemes.autotp", _HALVES, "in_turn(tuple(2 * size for size in _inner(case)))"),
        kills="activations",
        phase="forward",
        region="layers.0.mlp*",
        cause="rows_permuted|fused_cut",
    ),
    Mutant(
        name="context-columns-cut-by-features",
        stands_for="experts.md 27.3: DeepSpeed get_shard_size goes by the name, so that o_proj may miss its heads",
        modes={"autotp": "kv_heads_rest>0"},
        changes=_change(
            "schemes.autotp",
            'case "wq" | "wo":\n            return query_rows(heads, case.tp)',
            'case "wq":\n            return query_rows(heads, case.tp)\n'
            '        case "wo":\n            return in_turn(shard_sizes(case.hidden, case.tp, name="mlp"))',
        ),
        kills="run",
        cause="raised",
    ),
    Mutant(
        name="remainder-of-features-dropped",
        stands_for="modes.md 8.1, experts.md 27.1: DeepSpeed strided_copy and copy drop what // leaves",
        modes={"autotp": "ffn_rest>0"},
        condition="family!=opt",
        changes=_change(
            "slicing.sizes",
            "(share * grain for share in even_shares(total // grain, ranks))",
            "[total // grain // ranks * grain] * ranks",
        ),
        kills="merge",
        phase="forward",
        region="layers.0.mlp*|head",
        cause="layout",
    ),
    Mutant(
        name="tokens-of-the-head-trimmed-at-the-front",
        stands_for="experts.md 27.4: DeepSpeed GatherFromTensorParallelRegion pads smaller parts and trims them again",
        modes={"autotp": "vocab_rest>0"},
        condition="head=gather tied=false",
        changes=_change("communication.pairs", _TRIMMED, _TRIMMED.replace(":width]", "widest - width :]")),
        kills="forward",
        phase="forward",
        region="head",
    ),
)
UNEVEN_BOUNDARIES = (
    Mutant(
        name="columns-of-another-rank-s-features",
        stands_for="modes.md 8.2: DeepSpeed lm_head, input and weight cut by sizes of two names",
        modes={"autotp": "hidden_rest=0"},
        condition="head=sum",
        changes=_change(
            "schemes.autotp",
            "pairs.own_part(x, axis, own), weight",
            "pairs.own_part(x, axis, self.held[-1 - axis.rank]), weight",
        ),
        kills="forward",
        phase="forward",
        region="head",
    ),
    Mutant(
        name="gradient-of-a-part-at-the-start",
        stands_for="DeepSpeed ScatterToTensorParallelRegion: the gradient of a part goes back to its place",
        modes={"autotp": "head=sum"},
        changes=_change("communication.pairs", _COMPLETED, "whole[..., : len(part)] = own"),
        kills="activation_gradients",
        phase="backward",
        region="head|final_norm",
    ),
    Mutant(
        name="gathered-gradient-at-an-even-place",
        stands_for="experts.md 27.4: uneven parts begin where the parts before them end",
        modes={"autotp": "vocab_rest>0"},
        condition="head=gather tied=false",
        changes=_change(
            "communication.pairs", "max(widths), sum(widths[: axis.rank])", "max(widths), axis.rank * min(widths)"
        ),
        kills="parameter_gradients",
        phase="backward",
        region="head|final_norm",
    ),
    Mutant(
        name="gradient-of-a-gathered-head-not-summed",
        stands_for="B-12: DeepSpeed ColumnParallel, its input gradient that of one rank's columns alone",
        modes={"autotp": "head=gather"},
        condition="tied=false",
        changes=_change(
            "schemes.autotp",
            "logits = column_linear(x, self.weight, None, self.region)",
            "logits = functional.linear(x, self.weight)",
        ),
        kills="ledger",
        phase="backward",
        region="head|final_norm",
        cause="missing_call",
    ),
)
UNEVEN_REDUCTIONS = (
    Mutant(
        name="gradient-of-a-part-not-completed",
        stands_for="DeepSpeed LmHeadLinearAllreduce trained: each rank keeps the gradient of its own input features",
        modes={"autotp": "head=sum"},
        changes=_change("communication.pairs", "return all_reduce(whole, axis)", "return whole"),
        kills="ledger",
        phase="backward",
        region="head|final_norm",
        cause="missing_call",
    ),
    Mutant(
        name="tied-columns-gradient-left-apart",
        stands_for="experts.md 27.4: a tied head cut by columns, whose token table every rank updates by its own part",
        modes={"autotp": "head=sum"},
        condition="tied=true",
        changes=_change(
            "schemes.autotp",
            _OWN_WEIGHT,
            "torch.cat([tied_weight[:, part.start : part.stop] for part in own], 1) if self.weight is None",
        ),
        kills="ledger",
        phase="backward|grad_sync",
        region="head|embedding*|",
        cause="missing_call",
    ),
    Mutant(
        name="partial-logits-not-summed",
        stands_for="modes.md 8.2: DeepSpeed's row linear head, its all-reduce left out",
        modes={"autotp": "head=sum"},
        changes=_change(
            "schemes.autotp",
            _SUMMED,
            _SUMMED.replace("pairs.reduce_from(", "(").replace(", weight), axis)", ", weight))"),
        ),
        kills="ledger",
        phase="forward",
        region="head",
        cause="missing_call",
    ),
    Mutant(
        name="whole-tables-summed-over-the-split",
        stands_for="experts.md 27.4: a gradient that is whole on every rank, all-reduced as those of q/k norms are",
        modes={"autotp": ""},
        changes=_change(
            "schemes.autotp",
            "partial=tensor.head_partial",
            'partial=lambda case, name: tensor.head_partial(case, name) or name.startswith("embedding.")',
        ),
        kills="parameter_gradients",
        phase="grad_sync|backward",
        region="embedding*|",
        cause="summed_twice",
    ),
    Mutant(
        name="whole-logits-in-the-split-loss",
        stands_for="H1: Megatron issue 7452, InternEvo: gathered logits in the vocabulary-parallel loss",
        modes={"autotp": ""},
        changes=_change("schemes.autotp", "labels, alone, vocab", 'labels, mesh.axis("tp"), vocab'),
        kills="ledger",
        phase="loss",
        region="",
        cause="extra_call|more_classes",
    ),
)
