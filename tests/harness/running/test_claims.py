"""The modes of a subject: what no case can have is left out or refused, and what is no tuple of words is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from harness.errors import RequestError
from harness.subject import claims
from reference.rules import MODES

silent = SimpleNamespace()
ahead = SimpleNamespace(modes=("tp", "ep", "tp"))
foreign = SimpleNamespace(modes=("ep", "cp"))
none = SimpleNamespace(modes=())
number = SimpleNamespace(modes=7)
word = SimpleNamespace(modes="tp")
numbers = SimpleNamespace(modes=("tp", 7))
HERE = f"{__name__}:"
LEGAL = "legal: tp|tp-sp|mtp|msp|fsp|isp"


def test_a_subject_that_claims_nothing_is_asked_everything() -> None:
    assert claims(f"{HERE}silent").modes == claims("parallel.subject:subject").modes == MODES


def test_a_mode_that_no_case_can_have_is_left_out_and_known() -> None:
    found = claims(f"{HERE}ahead")
    assert (found.chosen("all"), found.chosen("tp,tp"), found.unknown) == (("tp",), ("tp",), ("ep",))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("foreign", f"modes=('ep', 'cp') names no mode that a case can have; {LEGAL}"),
        ("none", f"modes=() names no mode that a case can have; {LEGAL}"),
        ("number", "modes=7 must be a tuple of words; legal: modes = ('tp',)"),
        ("word", "modes='tp' must be a tuple of words; legal: modes = ('tp',)"),
        ("numbers", "modes=('tp', 7) must be a tuple of words; legal: modes = ('tp',)"),
    ],
)
def test_other_claims_are_refused(name: str, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        claims(f"{HERE}{name}")
    assert str(caught.value) == f"subject={HERE}{name}: {message}"


@pytest.mark.parametrize(("text", "more"), [("ep", ", and no case has the mode ep"), ("zz", "")])
def test_a_mode_that_cannot_be_asked_for_is_refused(text: str, more: str) -> None:
    with pytest.raises(RequestError) as caught:
        claims(f"{HERE}ahead").chosen(text)
    assert str(caught.value) == f"modes={text}: {HERE}ahead claims tp, ep{more}; legal: --modes all"
