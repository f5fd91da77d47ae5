"""Faults do to every collective what they say. Expected values are computed by hand; rank r of two
brings [1, 2] + 2r.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardproof.harness.engines.faults.disturbance import Disturbance
from shardproof.harness.engines.threads.inproc import InprocEngine, Intervened
from shardproof.harness.errors import Desynchronised, RequestError
from shardproof.harness.faults import Fault, faults_of, targets_of
from shardproof.harness.ledger import Event
from tests.harness.engines.programs import gather_flat
from tests.harness.recording.toy_calls import recorded
from tests.harness.toy_subjects import LoopEngine

Program = Callable[[int], Tensor]
AXES = {"tp": ((0, 1),)}
ON_FOUR = {"tp": ((0, 1), (2, 3)), "dp": ((0, 2), (1, 3))}
scatter_flat: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def pair(rank: int) -> Tensor:
    return torch.tensor([1.0, 2.0]) + 2 * rank


def in_place(call: Callable[[Tensor], object]) -> Program:
    def program(rank: int) -> Tensor:
        x = pair(rank)
        call(x)
        return x

    return program


def into(size: int, call: Callable[[Tensor, Tensor], object]) -> Program:
    def program(rank: int) -> Tensor:
        out = torch.zeros(size)
        call(out, pair(rank))
        return out

    return program


PROGRAMS: dict[str, Program] = {
    "all_reduce": in_place(dist.all_reduce),
    "largest": in_place(lambda x: dist.all_reduce(x, dist.ReduceOp.MAX)),
    "broadcast": in_place(lambda x: dist.broadcast(x, 0)),
    "message": in_place(lambda x: dist.send(x, 1) if dist.get_rank() == 0 else dist.recv(x, 0)),
    "all_gather": into(4, gather_flat),
    "all_gather_list": into(4, lambda out, x: dist.all_gather(list(out.chunk(2)), x)),
    "reduce_scatter": into(1, scatter_flat),
    "exchange": into(2, dist.all_to_all_single),
}


def ledger(program: Program, world_size: int = 2) -> list[Event]:
    return recorded(program, world_size, AXES if world_size == 2 else ON_FOUR)


@pytest.mark.parametrize(
    ("name", "fault", "left"),
    [
        # after a dropped call the rank has its own values only
        ("all_reduce", "drop", [[1, 2], [3, 4]]),
        ("broadcast", "drop", [[1, 2], [3, 4]]),
        ("all_gather", "drop", [[1, 2, 1, 2], [3, 4, 3, 4]]),
        ("all_gather_list", "drop", [[1, 2, 1, 2], [3, 4, 3, 4]]),
        ("reduce_scatter", "drop", [[1], [4]]),
        ("exchange", "drop", [[1, 1], [4, 4]]),
        ("message", "drop", [[1, 2], [3, 4]]),
        ("all_reduce", "drop on rank 1", [[4, 6], [3, 4]]),
        # a doubled one is made on its result, or counts twice
        ("all_reduce", "double", [[8, 12], [8, 12]]),
        ("largest", "double", [[3, 4], [3, 4]]),
        ("all_gather", "double", [[1, 2, 3, 4], [1, 2, 3, 4]]),
        ("reduce_scatter", "double", [[8], [12]]),
        ("exchange", "double", [[1, 2], [3, 4]]),
        # another reduction, the ranks in reverse order, a call that was never made before
        ("all_reduce", "op to avg", [[2, 3], [2, 3]]),
        ("largest", "op to min", [[1, 2], [1, 2]]),
        ("reduce_scatter", "op to max", [[3], [4]]),
        ("all_gather", "group to reversed", [[3, 4, 1, 2], [3, 4, 1, 2]]),
        ("reduce_scatter", "group to reversed", [[6], [4]]),
        ("all_reduce", "stale", [[0, 0], [0, 0]]),
        ("all_gather", "poison", [[math.nan] * 4] * 2),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_fault_leaves_what_it_says(engine: InprocEngine, name: str, fault: str, left: list[list[float]]) -> None:
    kind, _, change = fault.partition(" to ")
    kind, _, rank = kind.partition(" on rank ")
    program = PROGRAMS[name]
    faults = faults_of(ledger(program), AXES, kinds=(kind,), rank=int(rank or -1))
    (one,) = (fault for fault in faults if fault.change == change)
    found = torch.stack(Intervened(engine, Disturbance(one)).run(program, world_size=2))
    assert torch.equal(found.nan_to_num(-1), torch.tensor(left).nan_to_num(-1))


def test_stale_is_the_call_before(engine: InprocEngine) -> None:
    def thrice(rank: int) -> Tensor:
        sums = [pair(rank) * scale for scale in (1, 10, 100)]
        for x in sums:
            dist.all_reduce(x)
        return torch.cat(sums)

    events = ledger(thrice)
    calls = tuple((event.rank, event.call_index) for event in events)
    target = replace(targets_of(events)[0], calls=calls)  # all three of them
    ranks = Intervened(engine, Disturbance(Fault(kind="stale", target=target))).run(thrice, world_size=2)
    assert [x.tolist() for x in ranks] == [[4, 6, 4, 6, 40, 60]] * 2


@pytest.mark.parametrize("is_async", [False, True])
def test_what_is_late_arrives_at_the_ranks_next_call_after_the_wait(engine: InprocEngine, is_async: bool) -> None:
    def late(rank: int) -> Tensor:
        x = pair(rank)
        work = dist.all_reduce(x, async_op=is_async)
        if work is not None:
            dist.broadcast(torch.ones(1), 0)
            work.wait()
        at_once = x.clone()
        dist.broadcast(torch.ones(1), 0)
        return torch.cat([at_once, x])

    (target,) = (target for target in targets_of(ledger(late)) if target.op == "all_reduce")
    ranks = Intervened(engine, Disturbance(Fault(kind="delay", target=target))).run(late, world_size=2)
    assert [x.tolist() for x in ranks] == [[1, 2, 4, 6], [3, 4, 4, 6]]


def test_another_axis_means_other_ranks_and_the_ledger_stays_clean(engine: InprocEngine) -> None:
    def over_tp(rank: int) -> Tensor:
        group = [dist.new_group(list(ranks), group_desc="tp") for ranks in ON_FOUR["tp"]][rank // 2]
        x = torch.tensor([10.0**rank])
        dist.all_reduce(x, group=group)
        return x

    clean = ledger(over_tp, 4)
    by_change = {fault.change: fault for fault in faults_of(clean, ON_FOUR, kinds=("group",))}
    assert set(by_change) == {"dp", "world"}
    found = {
        change: torch.cat(Intervened(engine, Disturbance(fault)).run(over_tp, world_size=4)).tolist()
        for change, fault in by_change.items()
    }
    assert found == {"dp": [101, 1010, 101, 1010], "world": [1111] * 4}
    disturbed = recorded(over_tp, 4, ON_FOUR, engine=Intervened(engine, Disturbance(by_change["dp"])))
    assert [(e.rank, e.axis, e.group_size) for e in disturbed] == [(e.rank, e.axis, e.group_size) for e in clean]


def test_the_same_ranks_in_another_order_are_another_group_of_a_gather_and_not_of_a_sum(engine: InprocEngine) -> None:
    def over_dp(rank: int) -> Tensor:
        group = [dist.new_group(list(ranks), group_desc="dp") for ranks in ON_FOUR["dp"]][rank % 2]
        x, parts = torch.ones(1), torch.zeros(2)
        dist.all_reduce(x, group=group)
        gather_flat(parts, x, group=group)
        return parts

    alone = {"dp": ON_FOUR["dp"]}  # (0, 2) and (1, 3); one rank later (1, 3) and (2, 0)
    found = faults_of(ledger(over_dp, 4), alone, kinds=("group",))
    assert [(fault.target.op, fault.change) for fault in found] == [("all_reduce", "world"), ("all_gather", "shifted")]


def test_every_call_of_a_ledger_belongs_to_one_target(engine: InprocEngine) -> None:
    def program(rank: int) -> Tensor:
        for name in ("broadcast", "all_reduce", "largest", "all_reduce", "message"):
            PROGRAMS[name](rank)
        return torch.zeros(1)

    events = ledger(program)
    targets = targets_of(events)
    assert sorted(call for target in targets for call in target.calls) == [(e.rank, e.call_index) for e in events]
    assert [(t.op, t.reduce_op, t.number) for t in targets] == [
        ("broadcast", "", 0),
        ("all_reduce", "sum", 0),
        ("all_reduce", "max", 0),
        ("all_reduce", "sum", 1),
        ("send", "", 0),
        ("recv", "", 0),
    ]


def test_an_engine_that_takes_no_interventions_says_so(engine: InprocEngine) -> None:
    fault = faults_of(ledger(PROGRAMS["all_reduce"]), AXES)[0]
    with pytest.raises(RequestError, match=f"engine={LoopEngine.name}: takes no interventions; legal: inproc"):
        Intervened(LoopEngine(), Disturbance(fault))


def test_a_fault_that_makes_ranks_part_is_told_like_any_other_parting(engine: InprocEngine) -> None:
    def uneven(rank: int) -> Tensor:
        group = [dist.new_group(list(ranks), group_desc="tp") for ranks in ON_FOUR["tp"]][rank // 2]
        x = torch.ones(2 + rank // 2)
        dist.all_reduce(x, group=group)
        return x

    faults = faults_of(ledger(uneven, 4), ON_FOUR, kinds=("group",))
    with pytest.raises(Desynchronised, match="by fault dp"):
        Intervened(engine, Disturbance(faults[0])).run(uneven, world_size=4)
