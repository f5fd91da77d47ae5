"""Two ways to run the benchmark's ranks as real processes on gloo: kept alive, or spawned for every example.

Ranks are sent a seed; each draws the weights and runs the dense pass itself, and answers with its error. Every wait is
bounded, and no process outlives its `with`.
"""

from __future__ import annotations

import tempfile
import time
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from suites.bench_workload import Passed, Sizes, data, dense, rank_program, shard, weights

__all__ = ["GlooPool", "spawned_example"]

LIMIT_S = 60.0
"""The longest wait for a process."""


def _error(rank: int, world_size: int, seed: int) -> float:
    """The largest difference of this rank's example from the dense pass."""
    sizes = Sizes(seed=seed)
    full, (x, dy) = weights(sizes), data(sizes)
    truth: Passed = dense(sizes, full, x, dy)
    mine = rank_program(rank, world_size, sizes, full, x, dy)
    pairs = [(mine.y_BSH, truth.y_BSH), (mine.dx_BSH, truth.dx_BSH)]
    pairs += [(grad, shard(name, truth.gradients[name], rank, world_size)) for name, grad in mine.gradients.items()]
    return max(float((one - other).abs().max()) for one, other in pairs)


def _join_group(rank: int, world_size: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timedelta(seconds=LIMIT_S)
    )


def _serve(rank: int, world_size: int, store: str, pipe: Connection) -> None:
    """The life of a kept process: answer seeds with errors until told to end."""
    _join_group(rank, world_size, store)
    pipe.send(None)
    while (seed := pipe.recv()) is not None:
        pipe.send(_error(rank, world_size, seed))
    dist.destroy_process_group()


class GlooPool:
    """Persistent gloo processes; a context manager."""

    def __init__(self, world_size: int) -> None:
        context = get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        self._pipes, self._processes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            arguments = (rank, world_size, f"{self._folder.name}/store", theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()  # so that a dead rank shows as the end of its pipe
            self._pipes.append(ours)
            self._processes.append(process)

    def example(self, seed: int, allowed: float) -> None:
        """One example on all ranks. Raises RuntimeError when it is wrong or a rank does not answer."""
        for pipe in self._pipes:
            pipe.send(seed)
        _judge([self._answer(rank) for rank in range(len(self._pipes))], allowed)

    def __enter__(self) -> Self:
        for rank in range(len(self._pipes)):
            self._answer(rank)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            if kind is None and process.is_alive():
                pipe.send(None)
        for process in self._processes:
            process.join(LIMIT_S if kind is None else 0)
            process.kill()
        self._folder.cleanup()

    def _answer(self, rank: int) -> float:
        pipe = self._pipes[rank]
        if not pipe.poll(LIMIT_S):
            raise RuntimeError(f"rank {rank} of the gloo pool did not answer within {LIMIT_S:.0f} s")
        try:
            answer: float = pipe.recv()
        except EOFError:
            raise RuntimeError(f"rank {rank} of the gloo pool died") from None
        return answer


def _spawned(rank: int, world_size: int, store: str, seed: int, allowed: float) -> None:
    _join_group(rank, world_size, store)
    _judge([_error(rank, world_size, seed)], allowed)
    dist.destroy_process_group()


def spawned_example(world_size: int, seed: int, allowed: float) -> float:
    """Seconds of one example whose processes are spawned for it. Raises what a rank raises."""
    with tempfile.TemporaryDirectory() as folder:
        start_s = time.perf_counter()
        arguments = (world_size, f"{folder}/store", seed, allowed)
        ranks = spawn(_spawned, args=arguments, nprocs=world_size, join=False)
        try:
            while not ranks.join(timeout=1.0):
                if time.perf_counter() - start_s > LIMIT_S:
                    raise RuntimeError(f"the spawned ranks did not end within {LIMIT_S:.0f} s")
        finally:
            for process in ranks.processes:
                process.kill()
        return time.perf_counter() - start_s


def _judge(errors: list[float], allowed: float) -> None:
    if not max(errors) < allowed:
        raise RuntimeError(f"the example is wrong by {max(errors):.1e}: its time means nothing")
