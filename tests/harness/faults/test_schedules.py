"""Schedules are values and races are facts: a planted race is found, named and shrunk, right programs do not change."""

from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from hypothesis import Phase, given, settings
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_group

from shardproof.bugs.planting import plant_subject, replace_text
from shardproof.harness.engines.faults.races import Explored, Schedule
from shardproof.harness.engines.threads.inproc import InprocEngine
from shardproof.harness.errors import Desynchronised, Raced
from shardproof.harness.running.proof import prove
from shardproof.harness.verdicts.verdict import FAIL
from shardproof.reference.case import Case
from shardproof.suites.drawing.strategies import schedules
from tests.harness.engines import out_of_step
from tests.harness.engines.programs import gather_flat

EARLY = Schedule(early=(True,) * 9)


def result(engine: InprocEngine, schedule: Schedule, program: Callable[[int], Any], world_size: int = 2) -> Any:
    return Explored(engine, schedule).run(program, world_size=world_size)


def sums(rank: int) -> Tensor:
    """Asynchronous calls of every kind, all waited for."""
    x = torch.tensor([1.0, 2.0]) + 2 * rank
    works = [dist.all_reduce(x, async_op=True)]
    full = torch.zeros(4)
    works.append(gather_flat(full[:4], torch.tensor([1.0, 2.0]) + 2 * rank, async_op=True))
    root = torch.full((2,), float(rank + 1))
    works.append(dist.broadcast(root, 1, async_op=True))
    peer = torch.full((2,), float(rank))
    works.append(dist.irecv(peer, 0) if rank else dist.isend(peer, 1))
    pending = functional.all_reduce(torch.tensor([10.0**rank, 0.0]), "sum", _get_default_group())
    for work in reversed(works):
        work.wait()
    return torch.cat([x, full, root, peer, pending])


@given(schedule=schedules())
@settings(max_examples=20)
def test_a_right_program_is_the_same_under_any_schedule(engine: InprocEngine, schedule: Schedule) -> None:
    right = [4, 6, 1, 2, 3, 4, 2, 2, 0, 0, 11, 0]
    assert [x.tolist() for x in result(engine, schedule, sums)] == [right, right]


def unwaited(rank: int) -> Tensor:
    x = torch.ones(2)
    dist.all_reduce(x, async_op=True)
    dist.barrier()
    return x * 2


def test_a_missing_wait_spreads_poison_and_is_named(engine: InprocEngine) -> None:
    assert [x.tolist() for x in engine.run(unwaited, world_size=2)] == [[4, 4]] * 2, "plain runs cannot see it"
    explored = Explored(engine, Schedule())
    assert all(x.isnan().all() for x in explored.run(unwaited, world_size=2))
    assert [(work.rank, work.op) for work in explored.unwaited] == [(0, "all_reduce"), (1, "all_reduce")]
    assert [x.tolist() for x in result(engine, EARLY, unwaited)] == [[4, 4]] * 2


def test_a_wait_that_our_subject_forgets_shows_in_its_numbers(engine: InprocEngine) -> None:
    lines = "            self.work.wait()\n", "            pass\n"
    forgetful = plant_subject(replace_text("shardproof.parallel.communication.collectives", *lines))
    case = Case.parse("mode=tp tp=2 layers=1 heads=4 kv_heads=4 hidden=16 ffn=16 seq=8 batch=2 steps=1")
    found = prove(case, forgetful, Explored(engine, Schedule()), explain=False)
    verdicts = {v.check: v.verdict for v in found.verdicts}
    assert verdicts["waits"] == verdicts["parameter_gradients"] == FAIL


def reused_input(rank: int) -> Tensor:
    x, full = torch.ones(2), torch.zeros(4)
    work = gather_flat(full, x, async_op=True)
    if rank == 1:
        x.zero_()
    work.wait()
    return full


def reused_output(rank: int) -> Tensor:
    x = torch.ones(2)
    work = dist.all_reduce(x, async_op=True)
    if rank == 1:
        x += 1
    work.wait()
    return x


def reused_message(rank: int) -> None:
    x = torch.ones(2)
    if rank == 1:
        work = dist.isend(x, 0)
        x.mul_(3)
        assert work is not None and work.wait()
    else:
        dist.recv(x, 1)


@pytest.mark.parametrize(
    ("program", "schedule", "named"),
    [
        (reused_input, Schedule(), "the input of all_gather #0 of world (0 1)"),
        (reused_output, EARLY, "the output of all_reduce #0 of world (0 1)"),
        (reused_message, Schedule(turns=(1,)), "the input of send #0 of world (0 1)"),
    ],
    ids=["late", "early", "other turns"],
)
def test_a_buffer_reused_before_the_wait_is_named(
    engine: InprocEngine, program: Callable[[int], Any], schedule: Schedule, named: str
) -> None:
    with pytest.raises(Raced) as raised:
        result(engine, schedule, program)
    first = program.__code__.co_firstlineno
    places = [word for word in raised.value.cause.split() if "test_schedules.py:" in word]
    assert raised.value.cause.startswith(f"rank 1 changed {named} between its issue at ")
    assert (raised.value.ranks, raised.value.exit_status) == ((1,), 1)
    lines = [int(place.rpartition(":")[2]) - first for place in places]
    assert lines == ([3, 5] if program is reused_message else [2, 5])


def first_to_come(rank: int) -> Tensor:
    """A result that depends on who sends first."""
    if rank:
        dist.send(torch.tensor([float(rank)]), 0)
        return torch.zeros(1)
    got = [torch.zeros(1), torch.zeros(1)]
    for x in got:
        dist.recv(x)
    return got[0] - got[1]


def test_a_dependence_on_order_is_found_and_shrunk(engine: InprocEngine) -> None:
    plain = engine.run(first_to_come, world_size=3)

    def differs(schedule: Schedule) -> bool:
        return any(map(torch.ne, plain, result(engine, schedule, first_to_come, 3)))

    quiet = settings(max_examples=300, database=None, derandomize=True, phases=(Phase.generate, Phase.shrink))
    found = hypothesis.find(schedules(), differs, settings=quiet)
    assert found.early == () and sum(found.turns) <= 2 and len(found.turns) <= 3


def test_the_same_schedule_is_the_same_run(engine: InprocEngine) -> None:
    def order(rank: int) -> None:
        for _ in range(3):
            ran.append(rank)
            dist.barrier()

    runs = []
    for turns in ((), (), (2, 1), (2, 1)):
        ran: list[int] = []
        result(engine, Schedule(turns=turns), order, 3)
        runs.append(ran)
    assert runs[0] == runs[1]
    assert runs[2] == runs[3] != runs[0]
    assert runs[2][:3] == [2, 1, 0]


def test_ranks_that_part_end_as_in_a_plain_run(engine: InprocEngine) -> None:
    for program in (out_of_step.skips, out_of_step.orders_differ, out_of_step.never_waits_alone):
        with pytest.raises(Desynchronised):
            result(engine, Schedule(turns=(1, 2, 1)), program, 3)
