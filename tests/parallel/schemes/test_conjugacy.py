"""Conjugacy: what goes backward follows from what went forward, told from events alone, without any closed form.

That right subjects obey is part of the ledger check, with a closed form or without (`harness.checking.laws`), and so of
`suites/test_communication.py`; here the law is seen to bite where there is no closed form.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from bugs.planting import planted
from harness.protocols import Subject
from parallel.subject import subject
from reference.case import Case
from suites.mutants.catalogue import of_file
from suites.mutants.mutant import Mutant
from suites.session.prover import Prover

MISSING = {"context-is-not-exchanged-back": "all-to-alls", "gradients-of-a-cut-sum-are-not-gathered": "reduce_scatters"}
"""Bug -> which moves lack their conjugates."""


class Closed:
    """A subject whose closed form nobody knows."""

    def __init__(self, inner: Subject) -> None:
        self.inner = inner

    def __call__(self, case: Case, device: torch.device) -> Mapping[str, Any]:
        """What the subject returns."""
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
