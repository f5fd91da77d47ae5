"""The environment of every rank: a launcher's words, the same in every engine, and one thread to compute on.

The words are torchrun's RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and LOCAL_SIZE,
DeepSpeed's number of ranks on a machine. Source: torch.distributed.run, deepspeed.launcher.launch.

torch, OpenMP and MKL keep for each thread the number of threads on which it computes. A new thread begins with one for
each processor, and torch's own setting reaches it only with its first parallel loop. A product before that would be
added up in another order than the same product later. So whatever computes sets the number to one when it begins: the
driver, each rank, and each thread that one of them or a truth starts. On small tensors more threads would only wait for
each other. For recorded programs (harness.programs) nothing is set, unless their ranks are threads.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import Thread
from typing import Any

import torch

from shardproof.harness.errors import RequestError

_MEET_AT = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
"""Where torchrun's ranks meet on one machine. Ranks of our engines have met already, so nothing listens there."""


def meeting_place(given: Mapping[str, str]) -> dict[str, str]:
    """The variables that say where ranks meet: as `given`, else those of one machine."""
    return {word: given.get(word, value) for word, value in _MEET_AT.items()}


def environment_of(
    rank: int, world_size: int, given: Mapping[str, str], local_rank: int | None = None
) -> dict[str, str]:
    """The variables of one rank, with the meeting place as `given` (`meeting_place`).

    `local_rank` is the rank's number on its machine, which has as many ranks as `given`; None: all are on this one.
    """
    own = {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    local_size = str(world_size) if local_rank is None else given.get("LOCAL_WORLD_SIZE", given.get("LOCAL_SIZE", ""))
    sizes = {"LOCAL_WORLD_SIZE": local_size, "LOCAL_SIZE": local_size} if local_size else {}
    return {**own, "LOCAL_RANK": str(rank if local_rank is None else local_rank), **sizes, **meeting_place(given)}


@contextmanager
def in_environment(words: Mapping[str, str]) -> Iterator[None]:
    """Inside, the process has these environment variables; afterwards they are as before."""
    before = {word: os.environ.get(word) for word in words}
    os.environ.update(words)
    try:
        yield
    finally:
        for word, value in before.items():
            os.environ.pop(word, None)
            os.environ.update({} if value is None else {word: value})


def require_own_world(given: Mapping[str, Any], rank: int, world_size: int, what: str) -> None:
    """Raises ValueError if the arguments of a program's init_process_group name another rank or size.

    `what` runs the rank: "process" or "thread".
    """
    for name, own in (("world_size", world_size), ("rank", rank)):
        if given.get(name, -1) not in {-1, own}:
            rule = f"the engine runs this {what} as rank {rank} of {world_size}"
            raise ValueError(f"init_process_group {name}={given[name]}: {rule}; legal: {name}={own}, or leave it out")


def rank_device(name: str, rank: int) -> torch.device:
    """This rank's device: on cuda a GPU of its own, made the current one. Raises RequestError if there are too few."""
    if name != "cuda":
        return torch.device(name)
    count, local = torch.cuda.device_count(), int(os.environ.get("LOCAL_RANK", rank))
    if local >= count:
        rule = f"every rank needs a GPU of its own, rank {local} finds {count} on this machine"
        raise RequestError(f"device=cuda: {rule}; legal: --device cpu, or at most {count} ranks")
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
"""Environment variables with which all threads of a new process begin on one thread."""


def use_one_thread() -> None:
    """From here on the calling thread computes on one thread, and so do those that torch makes for autograd."""
    torch.set_num_threads(1)


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside, the calling thread computes on one thread, and so does each new thread of Python.

    Afterwards the calling thread has as many as before.
    """
    before, start = torch.get_num_threads(), Thread.start

    def start_on_one(thread: Thread) -> None:
        run = thread.run

        def run_on_one() -> None:
            vars(thread).pop("run", None)  # it refers to the thread
            use_one_thread()
            run()

        if not thread.ident:  # a second start of a thread is the caller's error, which `start` raises
            vars(thread)["run"] = run_on_one
        start(thread)

    Thread.start = start_on_one  # type: ignore[assignment, method-assign]
    use_one_thread()
    try:
        yield
    finally:
        Thread.start = start  # type: ignore[method-assign]
        torch.set_num_threads(before)
