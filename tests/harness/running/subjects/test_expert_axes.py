"""The axes of experts in cases of a subject's own words: rank lists as in Megatron-Core, rules, and the truth alone."""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from harness.checking.evidence import FAIL, PASS
from harness.engines.threads.inproc import InprocEngine
from harness.plain_case import Vocabulary, WordError
from harness.running.proof import prove


def groups(sizes: dict[str, int]) -> dict[str, set[tuple[int, ...]]]:
    """The groups of every axis where ranks are numbered with the first axis fastest, as Megatron-Core does."""
    places = [place[::-1] for place in itertools.product(*(range(size) for size in reversed(sizes.values())))]
    found: dict[str, dict[tuple[int, ...], list[int]]] = {axis: {} for axis in sizes}
    for rank, place in enumerate(places):
        for number, axis in enumerate(sizes):
            found[axis].setdefault(place[:number] + place[number + 1 :], []).append(rank)
    return {axis: {*map(tuple, lists.values())} for axis, lists in found.items()}


EXPERTS = Vocabulary.of({"ep": 1, "etp": 1})


@pytest.mark.parametrize(
    ("tp", "cp", "dp", "pp", "ep", "etp"),
    [
        sizes
        for sizes in itertools.product((1, 2, 3), (1, 2), (1, 2), (1, 2), (1, 2, 4), (1, 2))
        if sizes[0] * sizes[1] * sizes[2] % (sizes[4] * sizes[5]) == 0
    ],
)
def test_the_groups_are_those_of_megatrons_order(tp: int, cp: int, dp: int, pp: int, ep: int, etp: int) -> None:
    case = EXPERTS.parse(f"tp={tp} cp={cp} dp={dp} pp={pp} ep={ep} etp={etp}")
    dense = groups({"tp": tp, "cp": cp, "dp": dp, "pp": pp})
    expert = groups({"etp": etp, "ep": ep, "edp": tp * cp * dp // (etp * ep), "pp": pp})
    assert case.world_size == tp * cp * dp * pp
    for axis in ("tp", "cp", "dp", "pp", "etp", "ep", "edp"):
        assert sorted(case.axes[axis]) == sorted({**expert, **dense}[axis]), axis
        assert [case.axis_rank(axis, rank) for rank in range(case.world_size)] == [
            next(ranks.index(rank) for ranks in case.axes[axis] if rank in ranks) for rank in range(case.world_size)
        ]


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


def test_an_axis_is_a_number() -> None:
    with pytest.raises(TypeError, match="the ranks of an axis are a whole number; legal: {'ep': 1}"):
        Vocabulary.of({"ep": "none"})


class _Experts:
    """A sum over the samples of all ranks: first over those that hold different experts, then over their copies."""

    words: Any = {"ep": 1}
    cases: Any = ("dp=2 ep=2",)
    truth = "alone"

    def __init__(self, *axes: str) -> None:
        self._axes = axes

    def __call__(self, case: Any, device: torch.device) -> dict[str, Tensor]:
        rank = dist.get_rank()
        numbers = [n for micro in range(case.micro) for n in case.samples(0, micro, case.axis_rank("dp", rank), 1)]
        total = torch.tensor(numbers, dtype=getattr(torch, case.dtype)).sum()
        for axis in self._axes:
            groups = {ranks: dist.new_group(ranks, group_desc=DESCRIBED[axis]) for ranks in case.axes[axis]}
            mine = next(ranks for ranks in groups if rank in ranks)
            if len(mine) > 1:
                dist.all_reduce(total, group=groups[mine])
        return {"loss/0": total}


DESCRIBED = {"ep": "EXPERT_MODEL_PARALLEL_GROUP", "edp": "EXPERT_DATA_PARALLEL_GROUP"}


def test_a_case_with_experts_is_proved_against_itself_on_one_rank(engine: InprocEngine) -> None:
    case = Vocabulary.of({"ep": 1}).parse("dp=4 ep=2 steps=1")
    right, wrong = prove(case, _Experts("ep", "edp"), engine), prove(case, _Experts("edp"), engine)
    assert right.verdict == PASS, [one.message for one in right.verdicts if one.verdict != PASS]
    assert {event.axis for event in right.events} == {"ep", "edp"}
    assert wrong.verdict == FAIL
