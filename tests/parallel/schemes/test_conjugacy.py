"""Conjugacy: what goes backward follows from what went forward, told from events alone, without any closed form.

That right subjects obey is part of the ledger check, with a closed form or without (`harness.checking.laws`), and so of
`suites/test_communication.py`; here the law is seen to bite where there is no closed form.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from bugs.planting import planted, replaced
from harness.protocols import Subject
from parallel.subject import subject
from reference.case import Case
from suites.session.prover import Prover

SIZES = "layers=1 heads=4 kv_heads=2 hidden=16 ffn=24 seq=8 vocab=264 steps=1 tp=2"
BACK = "lambda grad: _all_to_all(grad, axis, split_dim=gather_dim, gather_dim=split_dim)"
CUT = "lambda y: _reduce_scatter(y, axis, dim=dim), lambda grad: _all_gather(grad, axis, dim=dim))"
MISSING = {
    "context is not exchanged back": (
        f"mode=isp family=internlm2 {SIZES}",
        BACK,
        "lambda grad: torch.cat([grad.chunk(axis.size, gather_dim)[axis.rank]] * axis.size, split_dim)",
        "all-to-alls",
    ),
    "gradients of a cut sum are not gathered": (
        f"mode=tp-sp {SIZES}",
        CUT,
        CUT.replace("_all_gather(grad, axis, dim=dim)", "torch.cat([grad] * axis.size, dim)"),
        "reduce_scatters",
    ),
}
"""Bug -> (case, text of `parallel.communication.pairs`, wrong text, which moves lack their conjugates)."""


class Closed:
    """A subject whose closed form nobody knows."""

    def __init__(self, inner: Subject) -> None:
        self.inner = inner

    def __call__(self, case: Case, device: torch.device) -> Mapping[str, Any]:
        """What the subject returns."""
        found: Mapping[str, Any] = self.inner(case, device)
        return found


@pytest.mark.parametrize("bug", MISSING)
def test_a_missing_conjugate_is_told_without_a_closed_form(bug: str, prover: Prover) -> None:
    text, old, new, moves = MISSING[bug]
    assert Case.parse(text).mode in subject.modes
    (right,) = [v for v in prover.proof(Case.parse(text), Closed(subject)).verdicts if v.check == "ledger"]
    assert right.verdict == "pass"
    result = prover.proof(Case.parse(text), Closed(planted(replaced("parallel.communication.pairs", old, new))))
    (wrong,) = [verdict for verdict in result.verdicts if verdict.check == "ledger"]
    assert wrong.verdict == "fail"
    assert moves in wrong.message
