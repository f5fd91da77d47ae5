"""Steps behind skipped ones: two skips use up the patience of the loss scale, the third step is real at half of it."""

import pytest

from shardproof.bugs.planting import planted
from shardproof.harness.checking.evidence import FAIL
from shardproof.reference.case import Case
from shardproof.suites.mutants.catalogue import Mutant, of_file
from shardproof.suites.session.prover import Prover
from tests.parallel.case_tables import HALF, TABLES
from tests.parallel.test_parallel_subject import proved

SCALED = f"{TABLES['data_parallel'].sizes} layers=1 tied=false {HALF} steps=3 scaler=dynamic"
BEHIND_SKIPS = (
    f"{SCALED} mode=tp tp=2 heads=6 kv_heads=2 loss_scale=8192",
    f"{SCALED} mode=tp-sp tp=3 dp=2 zero=1 micro=2 loss_scale=4096",
    f"{SCALED} mode=tp tp=3 pp=2 layers=2 loss_scale=4096",
)
"""Gradients reach 1.1 to 1.8 times the largest number of float16, so half of the scale is clear of it."""


@pytest.mark.parametrize(
    ("words", "skipped"),
    [
        *((words, [1, 1, 0]) for words in BEHIND_SKIPS),
        (f"{SCALED} mode=tp tp=2 heads=6 kv_heads=2 loss_scale=512", [0, 0, 0]),
        (f"{SCALED} mode=tp tp=2 heads=6 kv_heads=2 loss_scale=65536", [1, 1, 1]),
        (f"{SCALED} mode=tp tp=2 kv_heads=2 grad_dtype=float32 loss_scale=8192", [0, 0, 0]),  # their sum is in float32
        (f"{SCALED} mode=tp tp=2 kv_heads=2 grad_dtype=float32 wgrad=fused loss_scale=65536", [1, 1, 1]),
    ],
)
def test_a_step_is_skipped_where_rounding_has_no_say(prover: Prover, words: str, skipped: list[int]) -> None:
    result = proved(prover, words)
    assert result.evidence is not None
    assert [result.evidence.merged.tensors[f"skipped/{step}"].item() for step in range(3)] == skipped


@pytest.mark.parametrize("bug", of_file("tests/loss_scales"), ids=lambda bug: bug.name)
def test_a_bug_behind_a_skip_is_killed(prover: Prover, bug: Mutant) -> None:
    found = prover.proof(Case.parse(BEHIND_SKIPS[0]), planted(bug.sources()))
    failed = {one.check: one.message for one in found.verdicts if one.verdict == FAIL}
    assert failed.keys() & {*bug.kills.split("|")}, failed
