"""A rank as a process: its world of torch.distributed for a run, its random streams, and how its program ended.

The default group is new for every run, distinguished in the store by a prefix, and destroyed afterwards whatever
happened. NCCL communicates CUDA tensors where there is a GPU, gloo the rest. Times are seconds of the monotonic clock,
which the processes of a machine share.
"""

import inspect
import os
import pickle
import random
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from shardproof.harness.engines.calls.callers import place_raised, what_led_to
from shardproof.harness.engines.engine import Program
from shardproof.harness.engines.rank_environment import (
    environment_of,
    in_environment,
    require_own_world,
    use_one_thread,
)
from shardproof.harness.errors import error_text
from shardproof.harness.torch_internals.world import redirect_function

_SLACK_S = 30.0
"""How much longer than the run torch waits: the engine's own limit comes first and reports more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResult:
    """How a rank's program ended: with a value, or with an exception and where it was raised.

    `error` can be pickled; it has the traceback in its notes. `caller` is "file:line in function" of the user's code.
    `behind` is what led to the exception, as a clause.
    """

    rank: int
    value: Any = None
    error: BaseException | None = None
    detail: str = ""
    caller: str = ""
    behind: str = ""
    at_s: float = 0.0


def run_rank(
    program: Program, args: tuple[Any, ...], *, rank: int, world_size: int, store: Any, seed: int, timeout_s: float
) -> RankResult:
    """Run the program as this rank of a fresh world over the store. Raises what torch raises when there is none."""
    with world(rank, world_size, store, timeout_s):
        seed_streams(seed)
        return result_of(program, args, rank)


@contextmanager
def world(rank: int, world_size: int, store: Any, timeout_s: float, local_rank: int | None = None) -> Iterator[None]:
    """torch.distributed initialised as this rank, on one thread; nothing of it is left afterwards."""
    use_one_thread()
    limit = timedelta(seconds=timeout_s + _SLACK_S)
    backend = "cpu:gloo,cuda:nccl" if dist.is_nccl_available() and torch.cuda.device_count() else "gloo"
    with in_environment(environment_of(rank, world_size, os.environ, local_rank)):
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)
        try:
            with redirect_function(c10d.init_process_group, _Adoption(rank, world_size)):
                yield
        finally:
            if dist.is_initialized():  # the program may have destroyed it
                with suppress(RuntimeError):  # connections that a dead peer has left broken
                    dist.destroy_process_group()


class _Adoption:
    """Stands for init_process_group in a program: its first call gets the world that exists."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._adopted = False

    def __call__(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Raises ValueError for another size or rank."""
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        require_own_world(given, self._rank, self._world_size, "process")
        if self._adopted or not dist.is_initialized():
            return original(*args, **kwargs)
        self._adopted = True
        return None


def seed_streams(seed: int) -> None:
    """Set the streams of torch, of Python's `random` and of numpy to `seed`, as every engine but `dry` does."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def result_of(program: Program, args: tuple[Any, ...], rank: int) -> RankResult:
    """Call the program on this rank: how it ended; SystemExit with status 0 is an end without a value."""
    try:
        value = program(rank, *args)
    except BaseException as error:  # also SystemExit: it must not end the process unreported
        if isinstance(error, SystemExit) and not error.code:
            return RankResult(rank=rank, at_s=time.monotonic())
        place = place_raised(error.__traceback__)
        return RankResult(
            rank=rank,
            error=_portable(error, rank),
            detail=error_text(error),
            caller=place,
            behind=what_led_to(error),
            at_s=time.monotonic(),
        )
    return RankResult(rank=rank, value=value, at_s=time.monotonic())


def _portable(error: BaseException, rank: int) -> BaseException:
    """The exception, or a RuntimeError of the same text if it cannot be pickled; its traceback as a note."""
    lines = "".join(traceback.format_exception(error)).rstrip()
    try:
        sent: BaseException = pickle.loads(pickle.dumps(error))
        sent = error if type(sent) is type(error) else RuntimeError(error_text(error))
    except Exception:  # whatever a user's own pickling raises
        sent = RuntimeError(error_text(error))
    sent.add_note(f"on rank {rank}:\n{lines}")
    return sent
