"""Ranks out of step: the in-process engine ends the run in under 50 ms, in one error with every rank's position."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from harness.engines.threads.inproc import InprocEngine
from harness.errors import Desynchronised, ProgramError
from tests import ROOT
from tests.harness.faults import faulty_programs as faulty

LIMIT_S = 0.05
Program = Callable[[int], Any]


@pytest.fixture(scope="module")
def engine() -> Iterator[InprocEngine]:
    with InprocEngine() as made:
        made.run(backward_of_two, world_size=2)  # the first backward of a process imports much
        yield made


def ones(*shape: int) -> Tensor:
    return torch.ones(shape)


class Summed(torch.autograd.Function):
    """Identity forward, all_reduce backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """x."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """The sum of the ranks' gradients."""
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


def backward_of_two(rank: int) -> None:
    x = ones(2).requires_grad_()
    (Summed.apply(x) * 2).backward(ones(2))


def usable(engine: InprocEngine) -> bool:
    """The engine runs a right program after whatever came before."""

    def program(rank: int) -> float:
        backward_of_two(rank)
        tensor = ones(1)
        dist.all_reduce(tensor, group=dist.new_group([0, 1]))
        return tensor.item()

    return engine.run(program, world_size=2) == [2, 2]


class Case(NamedTuple):
    """A faulty program, what the error is, and its first line."""

    program: Program
    world_size: int
    kind: str
    ranks: tuple[int, ...]
    cause: str


W2, W3 = "of world (0 1)", "of world (0 1 2)"
IN_CALL = f"ranks disagree in call #0 {W3}: "
STUCK = "no rank can go on: rank 0 waits for rank 1 in {}, rank 1 waits for rank 0 in {}".format
ENDED = "every rank has finished, but "
LACKS = "has finished, but rank 0 waits for it in"
CROSSED = ("all_reduce #0 of one (0 1)", "all_reduce #0 of other (0 1)")
UNNAMED = ("all_reduce #0 of group 2 (0 1)", "all_reduce #0 of group 3 (0 1)")
ALIKE = ("all_reduce #0 of tp, group 1 (0 1)", "all_reduce #0 of tp, group 2 (0 1)")
VOID = "rank 0's send in world (0 1) was never met by rank 1"
CASES = [
    Case(faulty.skips, 3, "skipped", (1,), f"rank 1 {LACKS} all_reduce #1 {W3}"),
    Case(faulty.skips_in_the_middle, 3, "mismatch", (1,), IN_CALL + "the shape is 2 on rank 1, 3 on ranks 0 2"),
    Case(faulty.orders_differ, 3, "mismatch", (2,), IN_CALL + "the op is broadcast on rank 2, all_reduce on ranks 0 1"),
    Case(faulty.ops_differ, 3, "mismatch", (0,), IN_CALL + "the op is barrier on rank 0, all_reduce on ranks 1 2"),
    Case(faulty.numels_differ, 3, "mismatch", (1,), IN_CALL + "the shape is 4 on rank 1, 3 on ranks 0 2"),
    Case(faulty.shapes_differ, 3, "mismatch", (1,), IN_CALL + "the shape is 2x3 on rank 1, 3x2 on ranks 0 2"),
    Case(faulty.dtypes_differ, 3, "mismatch", (1,), IN_CALL + "the dtype is int32 on rank 1, float32 on ranks 0 2"),
    Case(faulty.reduce_ops_differ, 3, "mismatch", (1,), IN_CALL + "the reduce op is max on rank 1, sum on ranks 0 2"),
    Case(faulty.roots_differ, 3, "mismatch", (1,), IN_CALL + "the root is 1 on rank 1, 0 on ranks 0 2"),
    Case(
        faulty.reduce_ops_differ,
        2,
        "mismatch",
        (0, 1),
        f"ranks disagree in call #0 {W2}: the reduce op is max on rank 1, sum on rank 0",
    ),
    Case(faulty.forms_differ, 3, "mismatch", (1,), IN_CALL + "the form is list on rank 1, single on ranks 0 2"),
    Case(faulty.functional_differs, 3, "mismatch", (0,), IN_CALL + "the reduce op is sum on rank 0, max on ranks 1 2"),
    Case(
        faulty.splits_differ,
        2,
        "mismatch",
        (0, 1),
        f"ranks disagree in all_to_all #0 {W2}: rank 0 sends 3 rows to rank 1, which expects 4",
    ),
    Case(
        faulty.groups_differ,
        3,
        "mismatch",
        (0, 1),
        f"ranks disagree in new_group #1 {W3}: rank 0 makes it of ranks 0 1, rank 1 of ranks 0 2",
    ),
    Case(
        faulty.messages_differ,
        2,
        "mismatch",
        (0, 1),
        f"ranks disagree in recv #0 {W2}: rank 0 sends float32 3 to rank 1, which receives float32 4",
    ),
    Case(
        faulty.later_messages_differ,
        3,
        "mismatch",
        (1, 0),  # who sends, who receives
        f"ranks disagree in recv #0 {W3}: rank 1 sends float32 3 to rank 0, which receives float32 4",
    ),
    Case(faulty.groups_cross, 2, "deadlock", (0, 1), STUCK(*CROSSED)),
    Case(faulty.unnamed_groups_cross, 2, "deadlock", (0, 1), STUCK(*UNNAMED)),
    Case(faulty.alike_groups_cross, 2, "deadlock", (0, 1), STUCK(*ALIKE)),
    Case(faulty.lives_differ, 2, "deadlock", (0, 1), STUCK(f"all_reduce #0 {W2} of life 2", f"all_reduce #0 {W2}")),
    Case(
        faulty.one_ends_two_wait,
        3,
        "skipped",
        (2,),
        f"rank 2 {LACKS} all_reduce #0 {W3}",
    ),
    Case(faulty.tags_differ, 2, "deadlock", (0, 1), STUCK(f"send #0 {W2}", f"recv #0 {W2}")),
    Case(faulty.both_send_first, 2, "deadlock", (0, 1), STUCK(f"send #0 {W2}", f"send #0 {W2}")),
    Case(faulty.nobody_sends, 2, "skipped", (1,), f"rank 1 {LACKS} recv #0 {W2}"),
    Case(faulty.never_waits_alone, 2, "skipped", (1,), ENDED + f"rank 1 never made all_reduce #0 {W2}"),
    Case(faulty.sends_into_the_void, 2, "skipped", (1,), ENDED + VOID),
]


def caught(engine: InprocEngine, program: Program, world_size: int) -> tuple[ProgramError, float]:
    """The error of a faulty program, and the shortest time in s of three tries, as the machine may be busy."""
    took: list[float] = []
    for _ in range(3):
        start_s = time.perf_counter()
        with pytest.raises(ProgramError) as problem:
            engine.run(program, world_size=world_size)
        took.append(time.perf_counter() - start_s)
    return problem.value, min(took)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.program.__name__}-{case.world_size}")
def test_ranks_out_of_step_end_in_one_error_within_50_ms(engine: InprocEngine, case: Case) -> None:
    error, took_s = caught(engine, case.program, case.world_size)
    assert isinstance(error, Desynchronised) and error.exit_status == 1
    assert (error.cause, error.kind, error.ranks) == (case.cause, case.kind, case.ranks)
    assert str(error).splitlines()[0] == case.cause
    assert [position.rank for position in error.positions] == list(range(case.world_size))
    for position in error.positions:
        if position.state == "waits in":
            assert position.op and position.number >= 0 and position.group
            found = re.search(r"(\w+)\.py:(\d+) in (\S+)$", position.caller)
            first, file = case.program.__code__.co_firstlineno, Path(case.program.__code__.co_filename).stem
            assert found and found[1] == file and first < int(found[2]) < first + 8
            assert found[3] in {case.program.__name__, "<lambda>"}
        else:
            assert position.state == "finished"
    assert took_s < LIMIT_S
    assert usable(engine)


def test_a_mismatch_is_told_even_when_another_rank_never_comes_back(engine: InprocEngine) -> None:
    def program(rank: int) -> None:
        dist.new_group([0, 1])
        while rank == 2:
            pass
        dist.all_reduce(ones(3 + rank))

    error, took_s = caught(engine, program, 3)
    assert error.cause == f"ranks disagree in call #0 {W3}: the shape is 4 on rank 1, 3 on rank 0"
    assert error.positions[2].state == "runs" and took_s < 1.0


def test_the_whole_message_word_for_word(engine: InprocEngine) -> None:
    error, _ = caught(engine, faulty.reduce_ops_differ, 3)
    at = f"at {_place(faulty.reduce_ops_differ, 1)} in reduce_ops_differ"
    assert str(error) == (
        "ranks disagree in call #0 of world (0 1 2): the reduce op is max on rank 1, sum on ranks 0 2\n"
        f"  rank 0: waits in all_reduce #0 of world (0 1 2): sum float32 3, {at}\n"
        f"  rank 1: waits in all_reduce #0 of world (0 1 2): max float32 3, {at}\n"
        f"  rank 2: waits in all_reduce #0 of world (0 1 2): sum float32 3, {at}"
    )
    error, _ = caught(engine, faulty.tags_differ, 2)
    line, end = f"at {_place(faulty.tags_differ, 2)}", "in tags_differ"
    other = f"at {_place(faulty.tags_differ, 4)}"
    assert str(error).splitlines()[1:] == [
        f"  rank 0: waits in send #0 of world (0 1): float32 3 to rank 1 tag 7, {line} {end}",
        f"  rank 1: waits in recv #0 of world (0 1): float32 3 from rank 0 tag 8, {other} {end}",
    ]


def _place(program: Program, line: int) -> str:
    """A line of a program, as positions name it."""
    code = program.__code__
    return f"{Path(code.co_filename).relative_to(ROOT)}:{code.co_firstlineno + line}"
