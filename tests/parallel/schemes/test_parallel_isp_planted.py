"""The tests of isp notice: each planted bug parts the ledger from the closed form, the outcome from the truth, or both.

The first five are what InternEvo does (modes.md section 10: G1, G2, E1, H1) or did. A bug that only moves or repeats
a call leaves every number right, so numbers alone would never show it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from bugs.planting import planted, replaced
from harness.differences import differences
from harness.engines.threads.inproc import InprocEngine
from harness.outcome.merging import merge
from harness.running.ranks.execution import execute
from parallel.subject import subject
from reference.case import Case
from reference.training import subject as dense
from tests.parallel.ranks import CPU

EVO = "mode=isp family=internlm2 vocab=24 heads=4 kv_heads=2 hidden=16 ffn=24 seq=8 steps=1 micro=2 lr=0.1"
SHARD = "return start_reduce_scatter(full, self.gathers.axis, dim=0)"
TABLE = "return reduce_scatter(grad, ctx.axis, dim=ctx.dim), None, None"
LOCAL = "pairs.gather_from_sequence(losses, sequence, dim=_SEQUENCE, tensor_parallel_output_grad=False)"
KV = "kv_pending = start_all_to_all(kv, axis, split_dim=_KV_HEADS, gather_dim=_SEQUENCE)"
AXES = 'data_axes=("wdp",),\n    loss_axes=("dp",),\n)'

PLANTED: dict[str, tuple[str, str, str, str, str]] = {
    "weight gradients averaged over wp (G2)": (
        "tp=2",
        "parallel.weights.prefetch",
        SHARD,
        SHARD.replace("dim=0", 'dim=0, op="avg"'),
        "ledger numbers",
    ),
    "norm gradients averaged over wp (G1)": (
        "tp=2",
        "parallel.training.step",
        "sync.sum_gradients(group, weight_axis, op=strategy.partial_op)",
        "[g.copy_(sync.all_reduce(g, weight_axis, op='avg')) for g in group]",
        "ledger numbers",
    ),
    "table gradient scattered from flat memory (E1)": (
        "tp=2",
        "parallel.weights.tables",
        TABLE,
        "return reduce_scatter(grad.flatten(), ctx.axis, dim=0).view_as(shard), None, None",
        "numbers",
    ),
    "gathered logits taken for a part of the vocabulary (H1)": (
        "tp=2 head=gather",
        "parallel.schemes.weight_parallel",
        'sequence if case.head == "exchange" else alone',
        "sequence",
        "ledger numbers",
    ),
    "loss of local logits sent back once per rank": (
        "tp=2 head=local",
        "parallel.schemes.weight_parallel",
        LOCAL,
        "pairs.gather_from_sequence(losses, sequence, dim=_SEQUENCE)",
        "ledger numbers",
    ),
    "gradients of repeated kv heads not summed": (
        "tp=4 wp=2 kv_heads=1",
        "parallel.layers.ulysses",
        "copies.sum(_KV_HEADS + 1)",
        "copies.select(_KV_HEADS + 1, 0)",
        "numbers",
    ),
    "kv heads repeated in the wrong order": (
        "tp=4 wp=2",
        "parallel.layers.ulysses",
        "torch.stack((k, v), 2).repeat_interleave(ctx.copies, _KV_HEADS)",
        "torch.stack((k, v), 2).repeat(1, 1, 1, ctx.copies, 1)",
        "numbers",
    ),
    "kv not waited for": (
        "tp=2",
        "parallel.layers.ulysses",
        "q_pending.wait(), kv_pending.wait().unbind(2)",
        "q_pending.wait(), kv_pending.finish().unbind(2)",
        "unwaited",
    ),
    "data axis of the other order of ranks": (
        "tp=2 dp=3 wp=3 heads=2 hidden=12 vocab=30",
        "parallel.schemes.isp",
        AXES,
        AXES.replace("wdp", "dp"),
        "ledger numbers",
    ),
    "q/k norms not summed": (
        "tp=2 qk_norm=true",
        "parallel.schemes.weight_parallel",
        'return not _is_split(name.rpartition(".")[0])',
        'return not _is_split(name.rpartition(".")[0]) and "q_norm" not in name',
        "ledger numbers",
    ),
    "positions not sliced": (
        "tp=2",
        "parallel.schemes.weight_parallel",
        "for x in (batch.tokens, batch.positions))",
        "for x in (batch.tokens, batch.positions.flip(1)))",
        "numbers",
    ),
    "fused gradients in another order": (
        "tp=2 fuse_weights=true",
        "parallel.weights.flat",
        "parts = own.split([full.numel() // axis.size for full in fulls])",
        "parts = own.roll(1).split([full.numel() // axis.size for full in fulls])",
        "numbers",
    ),
    "bias gradient lost": (
        "tp=2 bias=true",
        "parallel.weights.linear",
        "supply.reduce(rows.sum(0))",
        "supply.reduce(rows.sum(0) * 0)",
        "numbers",
    ),
    "recompute and backward gather twice": (
        "tp=2 recompute=full",
        "parallel.weights.prefetch",
        "uses = 2 if again and seats and seats[0].block in self.plan.recompute else 1",
        "uses = 1",
        "ledger",
    ),
    "recompute starts the next block": (
        "tp=2 recompute=full",
        "parallel.weights.prefetch",
        "seat.leaf == _PREFETCHING and not self._recomputing",
        "seat.leaf == _PREFETCHING",
        "ledger unwaited",
    ),
    "backward starts nothing ahead": (
        "tp=2",
        "parallel.weights.prefetch",
        "self._start(before)",
        "pass",
        "ledger",
    ),
    "gathered weights kept over the micro-batch": (
        "tp=2",
        "parallel.weights.prefetch",
        "if loan.uses == 0:",
        "if loan.uses < 0:",
        "ledger",
    ),
    "table not gathered in backward": (
        "tp=2",
        "parallel.weights.tables",
        "        all_gather(shard, ctx.axis, dim=ctx.dim)\n",
        "",
        "ledger",
    ),
    "norms summed in one call": (
        "tp=2",
        "parallel.training.step",
        "[partial] if strategy.coalesced else",
        "[partial] if True else",
        "ledger",
    ),
}
"""Bug -> (words, module, text, planted text, what notices it)."""


def _wrong(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).abs().max() > 1e-12 * expected.abs().max().clamp(min=1e-3))


def _noticed(case: Case, run_subject: Callable[..., Any]) -> str:
    """Which of ledger, numbers and unwaited calls tell this implementation from a right one."""
    with InprocEngine() as engine:
        run = execute(case, run_subject, engine, text=str(case))
    found = []
    if differences(run.events, subject.expected(case), range(case.world_size), []):
        found.append("ledger")
    merged, truth = merge(run.outcomes), dense.subject(case, CPU)
    if merged.flaws or any(_wrong(merged.tensors[name], expected) for name, expected in truth.items()):
        found.append("numbers")
    if run.unwaited:
        found.append("unwaited")
    return " ".join(found)


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_noticed(name: str) -> None:
    words, module, old, new, by = PLANTED[name]
    assert _noticed(Case.parse(f"{EVO} {words}"), planted(replaced(module, old, new))) == by


@pytest.mark.parametrize("words", sorted({words for words, *_ in PLANTED.values()}))
def test_nothing_is_noticed_without_a_bug(words: str) -> None:
    assert _noticed(Case.parse(f"{EVO} {words}"), subject) == ""
