"""The tests of isp notice: each planted bug parts the ledger from the closed form, the outcome from the truth, or both.

The first five are what InternEvo does (modes.md section 10: G1, G2, E1, H1) or did. A bug that only moves or repeats
a call leaves every number right, so numbers alone would never show it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from bugs.anchors import changed
from bugs.planting import planted
from harness.differences import differences
from harness.engines.threads.inproc import InprocEngine
from harness.outcome.merging import merge
from harness.running.ranks.execution import execute
from parallel.subject import subject
from reference.case import Case
from reference.case.variants import VARIANTS
from reference.training import subject as dense
from suites.mutants.catalogue import MUTANTS, of_file
from tests.parallel.ranks import CPU

EVO = "mode=isp family=internlm2 vocab=24 heads=4 kv_heads=2 hidden=16 ffn=24 seq=8 steps=1 micro=2 lr=0.1"
KNOWN = {bug.name: bug for bug in (*MUTANTS, *VARIANTS.values(), *of_file("tests/isp"))}
PLANTED = {
    "weights-averaged-in-backward": ("tp=2", "ledger numbers"),
    "partial-gradients-averaged": ("tp=2", "ledger numbers"),
    "scrambled-embedding": ("tp=2", "numbers"),
    "gathered-logits-loss": ("tp=2 head=gather", "ledger numbers"),
    "loss-sent-back-once-a-rank": ("tp=2 head=local", "ledger numbers"),
    "copies-of-a-kv-head-not-summed": ("tp=4 wp=2 kv_heads=1", "numbers"),
    "kv-heads-repeated-in-another-order": ("tp=4 wp=2", "numbers"),
    "keys-used-before-they-arrive": ("tp=2", "unwaited"),
    "data-axis-of-the-other-order": ("tp=2 dp=3 wp=3 heads=2 hidden=12 vocab=30", "ledger numbers"),
    "qk-norms-not-summed": ("tp=2 qk_norm=true", "ledger numbers"),
    "positions-not-sliced": ("tp=2", "numbers"),
    "fused-gradients-walked-with-another-stride": ("tp=2 fuse_weights=true", "numbers"),
    "bias-gradient-lost": ("tp=2 bias=true", "numbers"),
    "recompute-and-backward-gather-twice": ("tp=2 recompute=full", "ledger"),
    "recompute-starts-the-next-block": ("tp=2 recompute=full", "ledger unwaited"),
    "backward-starts-nothing-ahead": ("tp=2", "ledger"),
    "gathered-weights-kept-over-the-step": ("tp=2", "ledger"),
    "table-not-gathered-in-backward": ("tp=2", "ledger"),
    "norms-summed-in-one-call": ("tp=2", "ledger"),
}
"""Bug -> (words, what notices it)."""


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
    words, by = PLANTED[name]
    assert _noticed(Case.parse(f"{EVO} {words}"), planted(changed(name, KNOWN[name].changes))) == by


@pytest.mark.parametrize("words", sorted({words for words, *_ in PLANTED.values()}))
def test_nothing_is_noticed_without_a_bug(words: str) -> None:
    assert _noticed(Case.parse(f"{EVO} {words}"), subject) == ""
