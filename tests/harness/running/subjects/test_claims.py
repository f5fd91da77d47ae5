"""The modes of a subject: what no case can have is left out or refused, and what is no tuple of words is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from harness.errors import RequestError
from harness.subject import claims, named
from reference.language.modes import MODES


def that(**attributes: object) -> Callable[..., Mapping[str, Any]]:
    """A subject with these attributes."""

    def program(case: object, device: object) -> Mapping[str, Any]:
        return {}

    vars(program).update(attributes)
    return program


silent = that()
ahead = that(modes=("tp", "ep", "tp"))
foreign = that(modes=("ep", "cp"))
none = that(modes=())
number = that(modes=7)
word = that(modes="tp")
numbers = that(modes=("tp", 7))
HERE = f"{__name__}:"
LEGAL = "legal: tp|tp-sp|mtp|msp|fsp|isp|autotp"


def test_a_subject_that_claims_nothing_is_asked_everything() -> None:
    assert claims(named(f"{HERE}silent")).modes == claims(named("parallel.subject:subject")).modes == tuple(MODES)


def test_a_mode_that_no_case_can_have_is_left_out_and_known() -> None:
    found = claims(named(f"{HERE}ahead"))
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
        claims(named(f"{HERE}{name}"))
    assert str(caught.value) == f"subject={HERE}{name}: {message}"


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("ep", "no case has this mode; legal: all, or some of tp,tp-sp,mtp,msp,fsp,isp,autotp"),
        ("zz", "no case has this mode; legal: all, or some of tp,tp-sp,mtp,msp,fsp,isp,autotp"),
        ("isp", f"{HERE}ahead claims tp, ep; legal: --modes all"),
    ],
)
def test_a_mode_that_cannot_be_chosen_is_refused(text: str, rule: str) -> None:
    with pytest.raises(RequestError) as caught:
        claims(named(f"{HERE}ahead")).chosen(text)
    assert str(caught.value) == f"modes={text}: {rule}"
