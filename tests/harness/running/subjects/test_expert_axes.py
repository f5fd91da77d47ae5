"""The axes of experts in cases of a subject's own words: rank lists as in Megatron-Core, and rules."""

import itertools

import pytest

from harness.plain_case import Vocabulary, WordError


def groups(sizes: dict[str, int]) -> dict[str, set[tuple[int, ...]]]:
    """The groups of every axis where ranks are numbered with the first axis fastest, as Megatron-Core does."""
    places = [place[::-1] for place in itertools.product(*(range(size) for size in reversed(sizes.values())))]
    found: dict[str, dict[tuple[int, ...], list[int]]] = {axis: {} for axis in sizes}
    for rank, place in enumerate(places):
        for number, axis in enumerate(sizes):
            found[axis].setdefault(place[:number] + place[number + 1 :], []).append(rank)
    return {axis: {*map(tuple, lists.values())} for axis, lists in found.items()}


EXPERTS = Vocabulary.of({"ep": 1, "etp": 1})


def test_the_groups_are_those_of_megatrons_order() -> None:
    for tp, cp, dp, pp, ep, etp in itertools.product((1, 2, 3), (1, 2), (1, 2), (1, 2), (1, 2, 4), (1, 2)):
        if tp * cp * dp % (ep * etp):
            continue
        case = EXPERTS.parse(f"tp={tp} cp={cp} dp={dp} pp={pp} ep={ep} etp={etp}")
        dense = groups({"tp": tp, "cp": cp, "dp": dp, "pp": pp})
        expert = groups({"etp": etp, "ep": ep, "edp": tp * cp * dp // (etp * ep), "pp": pp})
        assert case.world_size == tp * cp * dp * pp
        for axis in ("tp", "cp", "dp", "pp", "etp", "ep", "edp"):
            assert sorted(case.axes[axis]) == sorted({**expert, **dense}[axis]), (case, axis)
            assert all(case.axis_rank(axis, rank) == ranks.index(rank) for ranks in case.axes[axis] for rank in ranks)


def test_without_a_word_for_it_etp_is_tp_and_a_case_without_both_has_no_expert_axes() -> None:
    case = Vocabulary.of({"ep": (1, 2)}).parse("tp=2 dp=2 ep=2")
    assert case.axis_sizes == {"tp": 2, "cp": 1, "dp": 2, "pp": 1, "etp": 2, "ep": 2, "edp": 1}
    assert case.axes["ep"] == ((0, 2), (1, 3)) and case.mode == "dp+ep+tp"
    assert set(Vocabulary.of({}).parse("tp=2").axes) == {"tp", "cp", "dp", "pp"}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("dp=2 ep=3", "ep=3: must divide tp * cp * dp, 2; legal: ep=1"),
        ("tp=2 dp=2 etp=2 ep=4", "ep=4: must divide tp * cp * dp, 2; legal: ep=1"),
        ("pp=2 ep=2", "ep=2: must divide tp * cp * dp, 1; legal: ep=1"),
        ("ep=0", "ep=0: must be at least 1; legal: ep=1"),
    ],
)
def test_experts_that_do_not_lie_evenly_on_the_ranks_are_refused(text: str, told: str) -> None:
    with pytest.raises(WordError, match=told.replace("*", r"\*")):
        EXPERTS.parse(text)
    with pytest.raises(TypeError, match="the ranks of an axis are a whole number; legal: {'ep': 1}"):
        Vocabulary.of({"ep": "none"})
