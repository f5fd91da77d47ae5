"""Every check is an oracle that can fail: handed a wrong reference, or wrong evidence where it has none, it does.

The table must name every check there is, so that a new one cannot come without its own wrong evidence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.checking.checks import CHECKS, examine
from harness.checking.evidence import FAIL, PASS, Evidence
from harness.checking.measures.kinds import kind_of
from harness.engines.engine import Unwaited
from harness.engines.threads.inproc import InprocEngine
from harness.outcome.blocks import localize
from harness.running.proof import prove
from harness.running.truth.reference import Reference
from harness.shard import Shard
from reference.case import Case
from reference.data.anchors import Facts
from reference.training import subject as dense
from tests.harness.toy_evidence import TERMS, events, evidence, named, outcome_of, truth, without


def right_ranks() -> tuple[dict[str, object], ...]:
    return tuple(outcome_of(rank, truth()) for rank in range(2))


def _nudged(tensor: Tensor) -> Tensor:
    return ~tensor if tensor.dtype == torch.bool else tensor + (1e-6 if tensor.is_floating_point() else 1)


def against(*kinds: str) -> Evidence:
    """Right ranks, held against a truth of which these kinds are another model's."""
    other = {name: _nudged(tensor) if kind_of(name) in kinds else tensor for name, tensor in truth().items()}
    return evidence(*right_ranks(), truth=other)


def repeated(*runs: dict[str, Tensor]) -> Evidence:
    seen = evidence()
    return replace(seen, repeats=tuple([localize(outcome_of(rank, run)) for rank in range(2)] for run in runs))


def torn() -> Evidence:
    first, second = right_ranks()
    return evidence(first, {**second, "loss/0": truth()["loss/0"] + 1e-15})


PARAM = next(name for name in truth() if name.startswith("param/"))
SAVED = f"saved/{PARAM}"


def saved_as(change: Callable[[Tensor], Tensor]) -> tuple[dict[str, Any], ...]:
    """Right ranks, the first of which has saved one parameter so."""
    first, *others = right_ranks()
    whole = change(truth()[PARAM])
    return ({**first, SAVED: Shard(whole, (0,) * whole.dim(), tuple(whole.shape))}, *others)


NUDGED = {**truth(), "loss/0": truth()["loss/0"] + 1e-15}
PROMISED = tuple(replace(term, hidden=True) for term in TERMS)
WRONG: dict[str, Callable[[], Evidence]] = {
    "coverage": lambda: evidence(*right_ranks(), truth={f"other/{name}": x for name, x in truth().items()}),
    "merge": lambda: evidence(*right_ranks(), truth={**truth(), "logits/0": torch.zeros(4, 3, 13)}),
    "data": lambda: evidence(facts=Facts(pairs={"one": (torch.ones(2), torch.zeros(2))}, reading="", unchecked=())),
    "replicas": torn,
    "initial_values": lambda: against("init"),
    "masks": lambda: against("mask"),
    "tokens": lambda: against("tokens"),
    "forward": lambda: against("loss", "logits"),
    "activations": lambda: against("act"),
    "activation_gradients": lambda: against("act_grad"),
    "parameter_gradients": lambda: against("grad"),
    "gradient_norm": lambda: against("grad_norm"),
    "update": lambda: against("param"),
    "saved": lambda: evidence(*saved_as(_nudged), truth={**truth(), SAVED: truth()[PARAM]}),
    "ledger": lambda: evidence(expectation=TERMS[:-1]),
    "groups": lambda: evidence(orders={"tp": ((0,), (1,))}),
    "overlap": lambda: evidence(expectation=PROMISED, hidden=frozenset()),
    "waits": lambda: evidence(unwaited=(Unwaited(rank=0, op="all_gather", number=0, group="tp", caller="m.py:1"),)),
    "parallelism": lambda: evidence(events=(), expectation=None),
    "determinism": lambda: repeated(NUDGED),
    "recording": lambda: repeated(NUDGED, NUDGED),
}
"""Check -> evidence in which nothing but what this check is held against is wrong."""


def test_every_check_has_its_wrong_evidence() -> None:
    assert set(WRONG) == set(CHECKS)


@pytest.mark.parametrize("check", WRONG)
def test_a_check_that_is_handed_a_wrong_reference_fails(check: str) -> None:
    assert check in named(examine(WRONG[check]()), FAIL)
    assert check not in named(examine(evidence()), FAIL)


@pytest.mark.parametrize("check", sorted(set(WRONG) - {"coverage", "parallelism"}))
def test_no_other_check_takes_offence(check: str) -> None:
    """`coverage` leaves nothing to compare, and a ledger without events is told by `parallelism` alone already."""
    assert named(examine(WRONG[check]()), FAIL) == {check}


def test_a_right_save_passes_and_one_of_another_shape_does_not() -> None:
    right = {**truth(), SAVED: truth()[PARAM]}
    assert examine(evidence(*saved_as(torch.clone), truth=right))["saved"].verdict == PASS
    kept = examine(evidence(*saved_as(lambda whole: torch.cat([whole, whole[:1]])), truth=right))
    assert named(kept, FAIL) == {"merge"}


@pytest.mark.parametrize("name", truth())
def test_every_single_tensor_of_the_truth_is_looked_at(name: str) -> None:
    other = {**truth(), name: _nudged(truth()[name])}
    assert len(named(examine(evidence(*right_ranks(), truth=other)), FAIL)) == 1


@pytest.mark.parametrize("place", range(len(TERMS)))
def test_every_single_term_of_the_expectation_is_looked_at(place: int) -> None:
    wrong = tuple(replace(term, calls=term.calls + (i == place)) for i, term in enumerate(TERMS))
    assert named(examine(evidence(expectation=wrong)), FAIL) == {"ledger"}
    lost = without(events(), phase=TERMS[place].phase, region=TERMS[place].region)
    assert named(examine(evidence(events=lost)), FAIL) == {"ledger"}


def other_truth(case: Case, device: torch.device) -> dict[str, Tensor]:
    """The truth of another seed: right in form, wrong in every number."""
    return dense.truth(case.but(seed=case.seed + 1), device)


def test_a_proof_against_another_model_fails_in_every_number(engine: InprocEngine) -> None:
    """No number is compared with itself (TransformerEngine's parallel loss test did: bugs.md, B-111)."""
    case = Case.parse("mode=tp tp=2 layers=1 hidden=16 heads=4 ffn=16 seq=8 vocab=264")
    wrong = Reference(truth=f"{__name__}:other_truth")
    result = prove(case, "parallel.subject:subject", engine, reference=wrong)
    failed = {verdict.check for verdict in result.verdicts if verdict.verdict == FAIL}
    passed = {verdict.check for verdict in result.verdicts if verdict.verdict == PASS}
    numbers = {"forward", "activations", "activation_gradients", "parameter_gradients", "gradient_norm", "update"}
    assert failed == numbers
    assert {"ledger", "merge", "replicas", "determinism"} <= passed
