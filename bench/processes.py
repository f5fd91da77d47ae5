"""The benchmark's ranks as real processes on gloo: those of the pool engine, or spawned for every example.

Both run the same example: ranks are sent a seed; each draws the weights, runs the dense pass itself and judges its own
part. Every wait is bounded.
"""

from __future__ import annotations

import tempfile
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from bench.workload import Passed, Sizes, data, dense, rank_program, shard, weights
from harness.engines.engine import Engine
from harness.interpreter import spawned

LIMIT_S = 60.0
"""The longest wait for a process."""


def pooled_example(engine: Engine, world_size: int, seed: int, allowed: float) -> None:
    """One example on the ranks of an engine. Raises RuntimeError when it is wrong."""
    _judge(engine.run(_error, world_size, seed, world_size=world_size, timeout_s=LIMIT_S), allowed)


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


def _spawned(rank: int, world_size: int, store: str, seed: int, allowed: float) -> None:
    _join_group(rank, world_size, store)
    _judge([_error(rank, world_size, seed)], allowed)
    dist.destroy_process_group()


def spawned_example(world_size: int, seed: int, allowed: float) -> float:
    """Seconds of one example whose processes are spawned for it.

    Raises what a rank raises, RuntimeError when the ranks do not end or compute something else.
    """
    with tempfile.TemporaryDirectory() as folder:
        start_s = time.perf_counter()
        arguments = (world_size, f"{folder}/store", seed, allowed)
        ranks = spawn(spawned(_spawned), args=arguments, nprocs=world_size, join=False)
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
