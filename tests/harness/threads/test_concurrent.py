"""Ranks at the same time: the same bits, the same ledger and the same errors as ranks that take turns."""

from __future__ import annotations

import inspect
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from harness.checking.evidence import PASS
from harness.checking.exact_checks import same_outcomes
from harness.engines.engine import Engine
from harness.engines.faults.disturbance import Disturbed
from harness.engines.named import engine_named
from harness.engines.threads.concurrent import ConcurrentEngine
from harness.engines.threads.inproc import InprocEngine
from harness.errors import Desynchronised, RankRaised, RequestError, TimeLimit
from harness.faults import Fault, targets_of
from harness.running.proof import prove
from harness.running.ranks.execution import execute
from parallel.subject import subject
from reference.case import Case
from tests.harness.faults import faulty_programs

SMALL = "layers=1 heads=4 kv_heads=4 hidden=16 ffn=16 seq=8 batch=2 steps=1"
EVO = f"preset=tiny-internlm2 {SMALL} vocab=264"
CASES = (
    f"mode=tp tp=2 dp=2 {SMALL}",
    f"mode=tp-sp tp=4 {SMALL}",
    f"mode=mtp tp=2 {EVO}",
    f"mode=msp tp=2 {EVO}",
    f"mode=fsp tp=4 {EVO}",
    f"mode=isp tp=2 dp=2 wp=4 overlap=true {EVO}",
)


@pytest.fixture(scope="module")
def together() -> Iterator[ConcurrentEngine]:
    with ConcurrentEngine() as engine:
        yield engine


@pytest.fixture(scope="module")
def in_turns() -> Iterator[InprocEngine]:
    with InprocEngine() as engine:
        yield engine


def test_ranks_are_inside_their_code_at_the_same_time(together: ConcurrentEngine) -> None:
    met = threading.Barrier(3, timeout=10)
    assert sorted(together.run(lambda rank: met.wait(), world_size=3)) == [0, 1, 2]


@pytest.mark.parametrize("text", CASES, ids=lambda text: text.partition("mode=")[2].partition(" ")[0])
def test_every_mode_gives_the_same_bits_and_the_same_ledger(
    together: ConcurrentEngine, in_turns: InprocEngine, text: str
) -> None:
    def said(engine: Engine) -> list[tuple[Any, ...]]:
        run = execute(Case.parse(text), subject, engine, text=text)
        outcomes.append(run.outcomes)
        return [(e.rank, e.call_index, e.op, e.axis, e.phase, e.region, e.shape, e.caller) for e in run.events]

    outcomes: list[Any] = []
    assert said(together) == said(in_turns)
    assert same_outcomes(*outcomes)


def test_a_case_is_proved_as_in_any_engine(together: ConcurrentEngine) -> None:
    assert prove(Case.parse(CASES[1]), subject, together).verdict == PASS
    with engine_named("inproc-concurrent") as named:
        assert isinstance(named, ConcurrentEngine)


def test_many_calls_in_crossing_groups_add_up_every_time(together: ConcurrentEngine) -> None:
    def program(rank: int) -> Tensor:
        rows = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][rank // 2]
        columns = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][rank % 2]
        x = torch.tensor([float(rank)])
        total = torch.zeros(1)
        for _ in range(20):
            y, z = x.clone(), x.clone()
            works = [dist.all_reduce(y, group=rows, async_op=True), dist.all_reduce(z, group=columns, async_op=True)]
            for work in works if rank % 2 else reversed(works):
                work.wait()
            total += y + z
            peer = torch.zeros(1)
            for request in dist.batch_isend_irecv(
                [dist.P2POp(dist.isend, x, (rank + 1) % 4), dist.P2POp(dist.irecv, peer, (rank - 1) % 4)]
            ):
                request.wait()
            total += peer
        return total

    # rows 0+1, 2+3; columns 0+2, 1+3; the neighbour before: 20 (1+2+3), 20 (1+4+0), 20 (5+2+1), 20 (5+4+2)
    for _ in range(15):
        assert torch.cat(together.run(program, world_size=4)).tolist() == [120, 100, 160, 220]


PARTING = [
    program
    for name, program in vars(faulty_programs).items()
    if inspect.isfunction(program) and list(inspect.signature(program).parameters) == ["rank"]
]


PAIRS = {
    faulty_programs.both_send_first,
    faulty_programs.splits_differ,
    faulty_programs.groups_cross,
    faulty_programs.unnamed_groups_cross,
    faulty_programs.alike_groups_cross,
}


@pytest.mark.parametrize("program", PARTING, ids=lambda program: program.__name__)
def test_ranks_that_part_are_told_apart_at_once(
    together: ConcurrentEngine, in_turns: InprocEngine, program: Callable[[int], None]
) -> None:
    kinds = []
    for engine in (in_turns, together):
        world_size = 2 if program in PAIRS else 3
        started_s = time.monotonic()
        with pytest.raises(Desynchronised) as parted:
            engine.run(program, world_size=world_size, timeout_s=20)
        assert time.monotonic() - started_s < 5
        kinds.append((parted.value.kind, len(parted.value.positions)))
    assert kinds[0] == kinds[1]


def test_a_rank_that_raises_ends_the_run_and_the_engine_serves_on(together: ConcurrentEngine) -> None:
    def raises(rank: int) -> None:
        if rank == 1:
            raise ZeroDivisionError("rank one")
        dist.barrier()

    with pytest.raises(RankRaised, match="rank 1 of 3 raised ZeroDivisionError: rank one"):
        together.run(raises, world_size=3)
    with pytest.raises(TimeLimit, match="rank 0 runs at "):
        together.run(lambda rank: endless() if rank == 0 else dist.barrier(), world_size=2, timeout_s=0.2)
    assert together.run(lambda rank: rank, world_size=3) == [0, 1, 2]


def endless() -> None:
    while True:
        time.sleep(0.001)


def test_the_callers_streams_and_processors_are_as_before(together: ConcurrentEngine) -> None:
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    together.run(lambda rank: torch.rand(3), world_size=2)
    assert torch.equal(torch.rand(1), expected)
    if sys.platform == "linux":
        everywhere = os.sched_getaffinity(0)
        assert together.run(lambda rank: os.sched_getaffinity(0), world_size=2) == [everywhere] * 2


def test_faults_need_turns(together: ConcurrentEngine, in_turns: InprocEngine) -> None:
    case = Case.parse(CASES[0])
    target = targets_of(execute(case, subject, in_turns, text="").events)[0]
    with pytest.raises(RequestError, match="engine=inproc-concurrent: takes no interventions"):
        Disturbed(together, Fault(kind="drop", target=target))
