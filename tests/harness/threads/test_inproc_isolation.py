"""State that ranks of the in-process engine have to themselves (os.environ too), and that nothing of it stays.

Memory does not grow with the number of runs either: what runs have freed in pieces goes back to the system.
"""

import contextvars
import ctypes
import gc
import os
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from shardproof.harness.engines.threads import rank_threads
from shardproof.harness.engines.threads.inproc import InprocEngine
from shardproof.harness.engines.threads.process_group import InprocGroup
from shardproof.harness.engines.threads.rank_threads import Heap, resident_bytes
from shardproof.harness.errors import RankRaised
from tests.forked import started
from tests.harness.engines import programs

KEPT = threading.local()
CONTEXT: contextvars.ContextVar[int] = contextvars.ContextVar("CONTEXT", default=-1)


def streams() -> tuple[Any, ...]:
    """The state of the process's random streams, comparable."""
    numpy_state: Any = np.random.get_state()
    name, words, *rest = numpy_state
    return torch.default_generator.get_state().tolist(), random.getstate(), (name, words.tolist(), *rest)


def draw(times: int) -> list[float]:
    """Draws of every stream, normal ones too: numpy and Python keep the second of a pair for the next draw."""
    drawn: list[float] = []
    for _ in range(times):
        drawn += [torch.rand(1).item(), random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn()]
    return drawn


@pytest.mark.parametrize("seed", [0, 7, -1])
def test_every_rank_draws_its_own_stream_from_the_seed_however_they_take_turns(engine: InprocEngine, seed: int) -> None:
    def program(rank: int) -> list[float]:
        drawn: list[float] = []
        for turn in range(4):
            drawn += draw((rank + turn) % 3)
            dist.barrier()
        return drawn

    found = engine.run(program, world_size=3, seed=seed)
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    longest = draw(5)
    assert [len(drawn) for drawn in found] == [15, 20, 25]
    assert all(drawn == longest[: len(drawn)] for drawn in found)
    assert engine.run(program, world_size=3, seed=seed) == found
    assert engine.run(program, world_size=3, seed=seed + 1) != found


@pytest.mark.parametrize(
    ("drawing", "half_drawn"), [("", True), ("torch", False), ("python", True), ("numpy", True), ("numpy", False)]
)
def test_the_callers_streams_go_on_as_if_nothing_had_run(engine: InprocEngine, drawing: str, half_drawn: bool) -> None:
    draws = {"torch": lambda: torch.rand(3), "python": random.random, "numpy": np.random.randn, "": lambda: None}

    def program(rank: int) -> None:
        draws[drawing]()
        dist.barrier()

    draw(1 if half_drawn else 2)
    if half_drawn:
        random.gauss(0, 1), np.random.randn()
    before = streams()
    engine.run(program, world_size=2)
    assert streams() == before
    with pytest.raises(RankRaised):
        engine.run(lambda rank: 1 / 0 if rank else program(rank), world_size=2)
    assert streams() == before


def test_thread_state_that_a_program_leaves_behind_does_not_reach_the_next(engine: InprocEngine) -> None:
    def leave(rank: int) -> torch.dtype:
        KEPT.value = rank
        CONTEXT.set(rank)
        torch.set_default_dtype((torch.float16, torch.float64)[rank])
        dist.barrier()
        torch.set_grad_enabled(False)
        torch.set_default_device("meta")
        torch.autocast("cpu").__enter__()
        return torch.ones(1).dtype

    def look(rank: int) -> tuple[Any, ...]:
        x, autocast = torch.ones(2), torch.is_autocast_enabled("cpu")
        return hasattr(KEPT, "value"), CONTEXT.get(), torch.is_grad_enabled(), x.device.type, x.dtype, autocast

    assert engine.run(leave, world_size=2) == [torch.float16, torch.float64]
    assert engine.run(look, world_size=3) == [(False, -1, True, "cpu", torch.float32, False)] * 3
    assert torch.is_grad_enabled() and torch.ones(1).device.type == "cpu"
    assert torch.get_default_dtype() is torch.float32


def test_torch_uses_one_thread_during_a_run_and_as_many_as_before_afterwards(engine: InprocEngine) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        found = engine.run(lambda rank: (torch.get_num_threads(), torch._C._is_multithreading_enabled()), world_size=2)
        assert found == [(1, False)] * 2
        with pytest.raises(RankRaised):
            engine.run(lambda rank: 1 / 0, world_size=2)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_rank_that_chose_another_number_of_threads_leaves_it_to_no_other_run(engine: InprocEngine) -> None:
    engine.run(lambda rank: torch.set_num_threads(3), world_size=2)
    assert engine.run(lambda rank: torch.get_num_threads(), world_size=2) == [1, 1]


def test_nothing_of_a_run_stays_alive_and_closing_ends_the_threads() -> None:
    def fail(rank: int) -> None:
        dist.barrier()
        raise ValueError(rank)

    def resharded(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        distribute_tensor(torch.ones(3, 5), mesh, [Shard(0)]).redistribute(mesh, [Shard(1)])

    def groups() -> list[InprocGroup]:
        gc.collect()
        return [entry for entry in gc.get_objects() if type(entry) is InprocGroup]

    others = set(threading.enumerate())
    before = groups()  # what an earlier test's traceback still holds
    with InprocEngine() as engine:
        for _ in range(3):
            engine.run(resharded, world_size=2)
            engine.run(lambda rank: dist.new_group([0, 1]).size(), world_size=2)
            with pytest.raises(RankRaised):
                engine.run(fail, world_size=2)
        alive = [group for group in groups() if not any(group is earlier for earlier in before)]
        idle = [thread for thread in set(threading.enumerate()) - others if thread.name == "rank (idle)"]
        assert alive == [] and len(idle) == 2
    for thread in idle:
        thread.join(5)
        assert not thread.is_alive()


def before_and_after(rank: int, meeting: str) -> int:
    """A process of a world of two, and runs of the engine before, beside and after that world."""
    with InprocEngine() as engine:
        assert engine.run(programs.summed, world_size=2) == [programs.total(2)] * 2
        assert not dist.is_initialized()
        dist.init_process_group("gloo", init_method=f"file://{meeting}", world_size=2, rank=rank)
        group = dist.new_group([0, 1])
        before, after = torch.full((2,), float(rank + 1)), list[float]()
        dist.all_reduce(before, group=group)
        assert engine.run(programs.summed, world_size=2) == [programs.total(2)] * 2
        assert dist.get_rank() == rank and dist.get_backend() == "gloo"

        def by_name() -> None:
            functional = torch.ops._c10d_functional
            after.extend(functional.wait_tensor(functional.all_reduce(before, "sum", group.group_name)).tolist())

        thread = threading.Thread(target=by_name)
        thread.start()
        thread.join()
        dist.destroy_process_group()
        assert engine.run(programs.summed, world_size=2) == [programs.total(2)] * 2
    assert (before.tolist(), after) == ([3.0, 3.0], [6.0, 6.0])
    return 0


def test_real_process_groups_work_before_and_after_runs_in_the_same_process(tmp_path: Path) -> None:
    processes = [started(before_and_after, rank, str(tmp_path / "meeting"), folder=tmp_path) for rank in range(2)]
    assert [process.ended() for process in processes] == [0, 0], [process.err for process in processes]


def test_an_address_that_the_process_was_given_stays(monkeypatch: pytest.MonkeyPatch, engine: InprocEngine) -> None:
    monkeypatch.setenv("MASTER_PORT", "12345")
    monkeypatch.setenv("RANK", "77")
    assert [found[6] for found in engine.run(programs.words, world_size=2)] == ["12345"] * 2


def test_changes_of_a_rank_are_its_own_and_do_not_stay(monkeypatch: pytest.MonkeyPatch, engine: InprocEngine) -> None:
    monkeypatch.setenv("SHARDPROOF_GIVEN", "by the process")
    monkeypatch.delenv("SHARDPROOF_MADE", raising=False)

    def program(rank: int) -> tuple[Any, ...]:
        os.environ["SHARDPROOF_MADE"] = str(rank)
        if rank == 1:
            del os.environ["SHARDPROOF_GIVEN"]
        dist.barrier()
        environ: Any = os.environ
        with pytest.raises(KeyError):  # as by Python
            environ["NOT_THERE"]
        with pytest.raises(KeyError):
            environ.pop("NOT_THERE")
        with pytest.raises(TypeError):
            environ["A"] = 1
        names = [name for name in os.environ if name.startswith("SHARDPROOF_")]
        return (sorted(names), os.environ["SHARDPROOF_MADE"], os.environ.get("SHARDPROOF_GIVEN"), len(os.environ))

    first, second = engine.run(program, world_size=2)
    assert first[:3] == (["SHARDPROOF_GIVEN", "SHARDPROOF_MADE"], "0", "by the process")
    assert second[:3] == (["SHARDPROOF_MADE"], "1", None)
    assert first[3] == second[3] + 1
    assert "SHARDPROOF_MADE" not in os.environ and os.environ["SHARDPROOF_GIVEN"] == "by the process"
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_char_p
    assert libc.getenv(b"SHARDPROOF_MADE") is None and libc.getenv(b"SHARDPROOF_GIVEN") == b"by the process"


def test_a_thread_that_a_rank_starts_reads_the_words_of_its_rank(engine: InprocEngine) -> None:
    def program(rank: int) -> str:
        found: list[str] = []
        thread = threading.Thread(target=lambda: found.append(os.environ["RANK"]))
        thread.start()
        thread.join()
        dist.all_reduce(torch.ones(1))
        return found[0]

    assert engine.run(program, world_size=3) == ["0", "1", "2"]


PIECE_BYTES = 2**16
"""Below what glibc maps one by one and gives back by itself."""


def holes(mib: int) -> torch.Tensor:
    """Allocate and free this many MiB, all but the last piece, which holds the heap's end where it is."""
    pieces = [torch.ones(PIECE_BYTES, dtype=torch.uint8) for _ in range(mib * 2**20 // PIECE_BYTES)]
    return pieces[-1]


@pytest.mark.skipif(not hasattr(rank_threads._C, "malloc_trim"), reason="this C library keeps no holes to give back")
def test_a_run_gives_back_what_was_freed_in_pieces() -> None:
    with InprocEngine() as engine:
        rank_threads._C.malloc_trim(0)  # holes of earlier tests would be filled first
        before = resident_bytes()
        engine._heap = Heap(slack_bytes=2**24, every=1)
        kept = holes(64)
        assert resident_bytes() - before > 50 * 2**20, "glibc itself gives nothing back while the last piece lives"
        engine.run(lambda rank: None, world_size=2)
        assert resident_bytes() - before < 20 * 2**20
    assert kept.sum() == PIECE_BYTES
