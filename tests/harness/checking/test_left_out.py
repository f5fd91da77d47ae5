"""Names that a subject does not return: missing inside a kind they leave coverage unknown, unless they are declared."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch

from harness.checking.coverage import coverage
from harness.checking.evidence import PASS, UNKNOWN, Finding
from harness.errors import RequestError
from harness.protocols import Subject
from harness.running.proof import CaseResult, prove
from harness.subject import NamedSubject, left_out, named
from reference.case import Case
from reference.training import subject as dense
from tests.harness.toy_evidence import evidence, outcome_of, truth
from tests.harness.toy_subjects import LoopEngine

W1, W2, BIAS = (f"layers.0.mlp.{leaf}" for leaf in ("w1.weight", "w2.weight", "w2.bias"))


def answer(*missing: str, declared: tuple[str, ...] = (), **more: torch.Tensor) -> Finding:
    """Coverage of a subject that returns all but these names."""
    values = {name: tensor for name, tensor in truth().items() if name not in missing} | more
    return coverage(evidence(*(outcome_of(rank, values) for rank in range(2)), declared=declared))


def test_a_gap_in_a_kind_is_unknown_and_says_what_to_return_or_declare() -> None:
    found = answer(f"grad/{BIAS}")
    assert found.verdict == UNKNOWN and found.unchecked == (f"grad/{BIAS}",)
    assert found.message.endswith(
        f"grad/{BIAS} is missing beside other grad/ names: return it, or declare what is left out as "
        f"subject.unchecked = ('grad/{BIAS}',)"
    )
    two = answer("loss/1", f"param/{W1}", f"param/{W2}")
    assert two.verdict == UNKNOWN
    assert "loss/1 is missing" in two.message and f"param/{W1}, param/{W2} are missing" in two.message


def test_a_kind_that_is_never_returned_is_a_note() -> None:
    grads = [name for name in truth() if name.startswith("grad/")]
    found = answer(*grads)
    assert found.verdict == PASS and set(found.unchecked) == set(grads)


def test_a_declared_gap_passes_and_is_listed_as_left_out_on_purpose() -> None:
    found = answer(f"grad/{BIAS}", declared=("grad/*.bias",))
    assert found.verdict == PASS
    assert found.unchecked == (f"grad/{BIAS} (left out on purpose)",)
    assert found.message.endswith("; 1 left out on purpose")
    partly = answer(f"grad/{BIAS}", f"grad/{W1}", declared=("grad/*.bias",))
    assert partly.verdict == UNKNOWN and f"grad/{W1} is missing" in partly.message and BIAS not in partly.message


def test_a_pattern_without_a_name_is_told_with_the_nearest_and_declares_nothing() -> None:
    found = answer(f"grad/{BIAS}", declared=(f"grads/{BIAS}",))
    assert found.verdict == UNKNOWN
    assert f"unchecked='grads/{BIAS}' matches no name of the truth (grad/{BIAS}?)" in found.message
    assert answer(declared=("nothing/*",)).verdict == PASS, "a model without biases has none to leave out"


def test_patterns_that_leave_out_everything_declare_nothing() -> None:
    for patterns in (("*",), ("l*", "[imt]*", "grad*", "param/*", "act*")):
        found = answer(f"grad/{BIAS}", declared=patterns)
        assert found.verdict == UNKNOWN and "declares every name of the truth" in found.message


def test_a_declared_name_that_is_returned_is_compared_all_the_same() -> None:
    assert answer(declared=(f"grad/{BIAS}",)).unchecked == ()


@pytest.mark.parametrize("said", ["grad/*.bias", 7, ("grad/*.bias", 7), {"grad/*.bias"}])
def test_a_declaration_that_is_no_tuple_of_words_is_refused(said: object) -> None:
    with pytest.raises(RequestError) as caught:
        left_out(NamedSubject(name="my:subject", call=cast("Subject", SimpleNamespace(unchecked=said))))
    rule = f"unchecked={said!r} must be a tuple of words; legal: unchecked = ('grad/*.bias',)"
    assert str(caught.value) == f"subject=my:subject: {rule}"
    assert left_out(named(dense.subject)) == ()


class Unbiased:
    """The dense model without the gradients of its biases."""

    def __init__(self, *unchecked: str) -> None:
        self.unchecked = unchecked

    def __call__(self, case: Case, device: torch.device) -> dict[str, torch.Tensor]:
        """All names but those."""
        outcome = dense.subject(case, device)
        return {name: x for name, x in outcome.items() if not (name.startswith("grad/") and name.endswith(".bias"))}


def proof(subject: Unbiased) -> CaseResult:
    case = Case.parse("mode=tp tp=2 layers=1 hidden=16 heads=2 seq=4 steps=1")
    return prove(case, subject, LoopEngine(), checks={"coverage": coverage})


def test_a_run_honours_what_its_subject_declares() -> None:
    assert (proof(Unbiased()).verdict, proof(Unbiased("grad/*.bias")).verdict) == (UNKNOWN, PASS)
    with pytest.raises(RequestError, match="unchecked="):
        proof(Unbiased(7))  # type: ignore[arg-type]
