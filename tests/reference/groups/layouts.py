"""Drawn layouts: any order of axes whose sizes differ pairwise, so that a group of the wrong axis has another size."""

from __future__ import annotations

from hypothesis import assume
from hypothesis import strategies as st

from reference.errors import CaseError
from reference.groups import Layout, RankOrder
from tests.reference.groups.systems import megatron

WORDS = ("tp", "cp", "ep", "dp", "pp")


def divisors(number: int) -> list[int]:
    return [part for part in range(1, number + 1) if number % part == 0]


@st.composite
def rank_orders(draw: st.DrawFn) -> RankOrder:
    """A mesh of four axes in any order, of pairwise different sizes."""
    axes = draw(st.permutations(WORDS[:4]))
    sizes = draw(st.permutations((1, 2, 3, 4)))
    return RankOrder.of("-".join(axes), dict(zip(axes, sizes, strict=True)))


@st.composite
def requests(draw: st.DrawFn) -> dict[str, int | str]:
    """What a user of Megatron states: pairwise different dense sizes, expert sizes that divide, and any order."""
    tp, cp, dp, pp = draw(st.permutations((1, 2, 3, 4)))
    stage = tp * cp * dp
    etp = draw(st.sampled_from(divisors(stage)))
    ep = draw(st.sampled_from(divisors(stage // etp)))
    order = "-".join(draw(st.permutations(WORDS)))
    return {"world": stage * pp, "tp": tp, "cp": cp, "pp": pp, "etp": etp, "ep": ep, "order": order}


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """A layout that Megatron allows; half of the orders end in pp."""
    request = draw(requests())
    if draw(st.booleans()):
        request["order"] = "-".join([*(word for word in str(request["order"]).split("-") if word != "pp"), "pp"])
    try:
        return megatron(**request)  # type: ignore[arg-type]
    except CaseError:
        assume(False)
        raise
