"""The number of threads on which torch computes for a case: one, in every thread and process that computes.

torch, OpenMP and MKL keep the number for each thread. A thread that is new begins with one for each processor, and
torch's own setting reaches it with its first parallel loop only. A product before that would be added up in another
order than the same product later. So whatever computes says it when it begins: the driver, each rank, each thread that
one of them or a truth starts. On small tensors more threads would only wait for each other.

Recorded programs (harness.programs) are as their authors have them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread

import torch

ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
"""Words for the environment of a process that is started to compute: all of its threads begin with them."""


def use_one_thread() -> None:
    """From here on the calling thread computes on one thread, and so do those that torch makes for autograd."""
    torch.set_num_threads(1)


@contextmanager
def one_thread() -> Iterator[None]:
    """Within it the calling thread computes on one thread, and so does each thread of Python that is started.

    Afterwards the calling thread has as many as before.
    """
    before, start = torch.get_num_threads(), Thread.start

    def start_on_one(thread: Thread) -> None:
        run = thread.run

        def run_on_one() -> None:
            vars(thread).pop("run", None)  # it refers to the thread
            use_one_thread()
            run()

        if not thread.ident:  # else it was started before, which is the caller's mistake
            vars(thread)["run"] = run_on_one
        start(thread)

    Thread.start = start_on_one  # type: ignore[assignment, method-assign]
    use_one_thread()
    try:
        yield
    finally:
        Thread.start = start  # type: ignore[method-assign]
        torch.set_num_threads(before)
