"""Census of replicated parameters, and conjugacy: which gradients must be summed, and what must go backward.

Which gradients need a sum is found by experiment: without it ranks disagree on them. Which are summed is read from the
ledger's bytes.
"""

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from bugs.planting import planted, replaced
from harness.outcome.merging import merge
from harness.protocols import Subject
from harness.running.ranks.execution import execute
from harness.running.ranks.watching import Execution
from parallel.registry import scheme_of
from parallel.subject import subject
from reference.case import Case
from reference.language.modes import MODES
from reference.model.parameters import shapes
from suites.mutants.catalogue import of_file
from suites.mutants.mutant import Mutant
from suites.session.prover import Prover

SIZES = "layers=1 heads=4 kv_heads=2 hidden=16 ffn=24 seq=8 vocab=264 steps=1 micro=1 tp=2"
WORDS = ("bias=true qk_norm=true positions=learned norm=layernorm", "bias=false positions=rope norm=rmsnorm dp=3")
SUMMED = "if strategy.partial(rank.case, name)]"
NORM_AND_LOSS = (8, 16)
"""Bytes of the calls beside gradients in grad_sync: the squared norm, the loss with its token count."""


def ran(prover: Prover, case: Case, run: Subject) -> Execution:
    """Recorded run of a case."""
    return execute(case, run, prover.engine, text=str(case))


def torn(run: Execution) -> set[str]:
    """Parameters on whose gradients ranks disagree."""
    flaws = merge(run.outcomes).flaws
    return {flaw.name.removeprefix("grad/") for flaw in flaws if flaw.name.startswith("grad/")}


def summed_bytes(run: Execution, axis: str) -> int:
    """Bytes of gradients that rank 0 sums over this axis between backward and step."""
    mine = [e for e in run.events if (e.rank, e.phase, e.op, e.axis) == (0, "grad_sync", "all_reduce", axis)]
    sizes = [event.payload_bytes for event in mine]
    for size in NORM_AND_LOSS[:1]:
        sizes.remove(size)  # the squared norm is always there, once a step
    return sum(sizes)


@pytest.mark.parametrize("words", WORDS)
@pytest.mark.parametrize("mode", MODES)
def test_the_set_that_is_summed_is_the_set_that_must_be(prover: Prover, mode: str, words: str) -> None:
    case = Case.parse(f"mode={mode} {SIZES} {words}")
    weight_axis = scheme_of(mode).weight_axis
    must = torn(ran(prover, case, planted(replaced("parallel.training.step", SUMMED, "if False]"))))
    right = ran(prover, case, subject)
    assert torn(right) == set()
    assert summed_bytes(right, weight_axis) == sum(8 * math.prod(shapes(case)[name]) for name in must)


MISSING = {"context-is-not-exchanged-back": "all-to-alls", "gradients-of-a-cut-sum-are-not-gathered": "reduce_scatters"}
"""Bug -> which moves lack their conjugates."""


class Closed:
    """A subject without a known closed form."""

    def __init__(self, inner: Subject) -> None:
        self.inner = inner

    def __call__(self, case: Case, device: torch.device) -> Mapping[str, Any]:
        """Outcome of the subject."""
        found: Mapping[str, Any] = self.inner(case, device)
        return found


@pytest.mark.parametrize("bug", of_file("tests/conjugates"), ids=lambda bug: bug.name)
def test_a_missing_conjugate_is_told_without_a_closed_form(bug: Mutant, prover: Prover) -> None:
    case = Case.parse(bug.case)
    assert case.mode in subject.modes
    (right,) = [v for v in prover.proof(case, Closed(subject)).verdicts if v.check == "ledger"]
    assert right.verdict == "pass"
    result = prover.proof(case, Closed(planted(bug.sources())))
    (wrong,) = [verdict for verdict in result.verdicts if verdict.check == "ledger"]
    assert wrong.verdict == "fail"
    assert MISSING[bug.name] in wrong.message
