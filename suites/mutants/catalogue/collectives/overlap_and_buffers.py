"""Overlap, accumulation and buffers: what is used too early, kept too long or overwritten (bugs.md 6h)."""

from __future__ import annotations

from suites.mutants.mutant import TENSOR, Change, Mutant, Words, everywhere

__all__ = ["OVERLAP_AND_BUFFERS"]

OVERLAPPED: Words = {"overlap": True}
"""What the property of asynchronous calls fixes."""
_BACK = "summed.backward()"
_DATA = everywhere("dp>1", TENSOR) | {"isp": "wdp>1"}
_SUM_DATA = "for axis in rank.strategy.data_axes:\n        sync.sum_gradients(gradients.values(), mesh.axis(axis))"
_PRODUCT = "return functional.linear(total, weight, bias)"
_ATTEND = 'x = x + self._dropped("attention", self.attention(self.attention_norm(x), table, hidden_B1SS, draw), draw)'
_BUFFER = "gathered = x.new_empty((axis.size * x.shape[0], *x.shape[1:]))"
_REDUCED = "reduced = region.start_reduce(grad @ weight, overlap=region.overlap and wants_weight)"
_SYNCED = "backward|grad_sync"
_LAST = "head|final_norm|embedding.*|layers.*"


def _change(module: str, old: str, new: str) -> Change:
    return Change(module=f"parallel.{module}", old=old, new=new)


OVERLAP_AND_BUFFERS = (
    Mutant(
        name="gradient-assigned-instead-of-added",
        stands_for="B-87: InternEvo 6682f5d, = where += belongs: earlier micro-batches are lost",
        modes=everywhere(),
        changes=(
            _change(
                "training.step",
                _BACK,
                f"for parameter in rank.parameters.values():\n            parameter.grad = None\n        {_BACK}",
            ),
        ),
        kills="parameter_gradients",
        phase=_SYNCED,
        region=_LAST,
        cause="micro_missing",
    ),
    Mutant(
        name="last-micro-batch-after-the-reduction",
        stands_for="B-89: DeepSpeed #7985, the last micro-batch is added after the all-reduce",
        modes=_DATA,
        changes=(
            _change("training.step", _SUM_DATA, _SUM_DATA.replace("rank.strategy.data_axes", "()")),
            _change(
                "training.step",
                _BACK,
                "if micro == case.micro - 1:\n            for axis in strategy.data_axes:\n                "
                f"sync.sum_gradients(rank.gradients().values(), rank.mesh.axis(axis))\n        {_BACK}",
            ),
        ),
        kills="replicas|parameter_gradients",
        phase="loss|data|metric|forward|grad_sync|backward",
        region="*",
        cause="wrong_place|not_summed|micro_missing|unequal_shares",
    ),
    Mutant(
        name="gradient-used-before-it-arrives",
        stands_for="B-90: DeepSpeed #5606, the result of a reduction is read without its wait",
        modes=everywhere("", TENSOR),
        condition="overlap=true",
        changes=(_change("layers.linear", "grad_x = reduced.wait()", "grad_x = reduced.finish()"),),
        kills="waits",
        phase="backward",
        region="head",
        cause="not_waited",
    ),
    Mutant(
        name="gathered-input-used-before-it-arrives",
        stands_for="B-90: DeepSpeed #7965, the same for a gather behind a product",
        modes=everywhere("", ("tp-sp", "fsp")),
        condition="overlap=true",
        changes=(_change("layers.linear", "grad, total.wait())", "grad, total.finish())"),),
        kills="waits",
        phase="backward",
        region="head",
        cause="not_waited",
    ),
    Mutant(
        name="keys-used-before-they-arrive",
        stands_for="B-90: Megatron #3693, the same for the exchange of keys and values",
        modes={"isp": ""},
        changes=(_change("layers.ulysses", "kv_pending.wait().unbind(2)", "kv_pending.finish().unbind(2)"),),
        kills="waits",
        phase="forward",
        region="layers.0.attention*",
        cause="not_waited",
    ),
    Mutant(
        name="handle-dropped",
        stands_for="B-90: DeepSpeed #7898, a handle nobody waits for, of a call whose result nobody reads",
        modes={"isp": ""},
        changes=(
            _change(
                "weights.tables",
                "import all_gather, reduce_scatter",
                "import all_gather, reduce_scatter, start_all_gather",
            ),
            _change(
                "weights.tables",
                "        all_gather(shard, ctx.axis, dim=ctx.dim)\n",
                "        start_all_gather(shard, ctx.axis, dim=ctx.dim)\n",
            ),
        ),
        kills="waits",
        alone=True,
        phase="backward",
        region="embedding",
        cause="not_waited",
    ),
    Mutant(
        name="send-buffer-reused-before-the-wait",
        stands_for="B-90, B-94: TE #1616, a buffer under way is overwritten",
        modes=everywhere("", TENSOR),
        condition="overlap=true",
        changes=(
            _change(
                "layers.linear",
                _REDUCED,
                f"sent = grad @ weight\n            {_REDUCED.replace('grad @ weight', 'sent')}\n"
                "            sent.zero_()",
            ),
        ),
        kills="activation_gradients",
        phase="backward",
        region="head|final_norm",
        cause="",
    ),
    Mutant(
        name="kept-input-overwritten",
        stands_for="B-94: TE PR #1554, the gathered input is clobbered before the weight's gradient is computed",
        modes={"msp": ""},
        changes=(
            _change(
                "layers.linear",
                _PRODUCT,
                f"y = {_PRODUCT[7:]}\n        if region.keep:\n            total.data.zero_()\n        return y",
            ),
        ),
        kills="parameter_gradients",
        phase="backward",
        region="head|embedding.tokens|layers.*",
        cause="zero",
    ),
    Mutant(
        name="layer-input-overwritten",
        stands_for="B-97, B-115: TE #1723, what backward or recompute needs is an alias that has changed meanwhile",
        modes=everywhere(),
        changes=(
            _change(
                "model.transformer",
                _ATTEND,
                f"h = {_ATTEND[8:]}\n        x.data.add_(h.data)\n        x = x + h - h.detach()",
            ),
        ),
        kills="parameter_gradients",
        phase="backward|recompute",
        region="embedding|layers.*",
        cause="",
    ),
    Mutant(
        name="gather-buffer-reused",
        stands_for="B-96: Megatron #5748, consecutive gathers share a buffer",
        modes={"isp": "overlap=true layers>1 fuse_weights=false"},
        changes=(
            _change(
                "communication.collectives",
                _BUFFER,
                "gathered = start_all_gather.__dict__.setdefault(\n        "
                "(dist.get_rank(), axis.name, x.shape), x.new_empty((axis.size * x.shape[0], *x.shape[1:]))\n    )",
            ),
        ),
        kills="activations|forward",
        phase="forward",
        region="layers.*",
        cause="",
    ),
    Mutant(
        name="gathered-weights-kept-over-the-step",
        stands_for="B-92: InternEvo bb20142, stale parameters are read in the next forward",
        modes={"isp": "overlap=true"},
        changes=(_change("weights.prefetch", "if loan.uses == 0:", "if loan.uses < 0:"),),
        kills="ledger",
        phase="forward|backward",
        region="*",
        cause="missing_call|stale",
    ),
    Mutant(
        name="recompute-and-backward-gather-twice",
        stands_for="B-93: InternEvo PR #366, weights are gathered twice in backward, with the right result",
        modes={"isp": "recompute=full fuse_weights=false"},
        suite=OVERLAPPED,
        changes=(
            _change(
                "weights.prefetch",
                "uses = 2 if again and seats and seats[0].block in self.plan.recompute else 1",
                "uses = 1",
            ),
        ),
        kills="ledger",
        phase="backward|recompute",
        region="*",
        cause="extra_call|wrong_place",
    ),
    Mutant(
        name="recompute-starts-the-next-block",
        stands_for="B-93: the recomputed block prefetches forward what backward never uses",
        modes={"isp": "recompute=full layers>1"},
        suite=OVERLAPPED,
        changes=(
            _change(
                "weights.prefetch", "seat.leaf == _PREFETCHING and not self._recomputing", "seat.leaf == _PREFETCHING"
            ),
        ),
        kills="ledger",
        phase="backward|recompute",
        region="layers.*",
        cause="extra_call",
    ),
    Mutant(
        name="backward-starts-nothing-ahead",
        stands_for="InternEvo's overlap lost: every gather is started where it is awaited",
        modes={"isp": "recompute!=full fuse_weights=false"},
        suite=OVERLAPPED,
        changes=(_change("weights.prefetch", "self._start(before)", "pass"),),
        kills="ledger",
        alone=True,
        phase="backward",
        region="layers.*",
        cause="wrong_place|missing_call",
    ),
    Mutant(
        name="kept-input-gathered-again",
        stands_for="B-93: Megatron's sequence parallelism gathers again what the paper's picture keeps (modes.md 2.1)",
        modes={"msp": ""},
        changes=(_change("schemes.msp", "keep=True", "keep=False"),),
        kills="ledger",
        alone=True,
        phase="backward",
        region="head",
        cause="extra_call",
    ),
    Mutant(
        name="gradients-not-zeroed",
        stands_for="B-91: Megatron #4609, a gradient buffer is not zeroed before the next step",
        modes=everywhere(),
        changes=(
            _change(
                "training.loop",
                "        optimizer.zero_grad()\n",
                "        if step == 0:\n            optimizer.zero_grad()\n",
            ),
        ),
        kills="gradient_norm",
        phase="step|grad_sync|backward",
        region="",
        cause="not_zeroed",
    ),
    Mutant(
        name="another-tensor-reduced",
        stands_for="B-98: DeepSpeed #5170, the reduced gradients are not those that the optimizer reads",
        modes=_DATA,
        changes=(
            _change(
                "training.step",
                _SUM_DATA,
                _SUM_DATA.replace("gradients.values()", "[g.clone() for g in gradients.values()]"),
            ),
        ),
        kills="replicas",
        phase=_SYNCED,
        region=_LAST,
        cause="not_summed",
    ),
)
