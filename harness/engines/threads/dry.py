"""The dry engine: ranks on torch's fake process group, one after another, meant for tensors of the meta device.

A rank sees a world of any size and communicates with no other: a collective returns at once and moves nothing. Calls,
their order and their bytes are those of a real run as long as the program reads no number. A program that does ends in
NoNumbers. The ranks run in this process, each in a thread, so that a rank that does not end can be given up. Calls are
seen by the interposer, at the dispatcher. A call of functional collectives on meta tensors reaches no group unless a
`harness.predicting.dry_run.Meter` is entered.

Source: torch's backend "fake" (harness.torch_internals.backends).
"""

import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardproof.harness.engines.calls.callers import place_raised, what_led_to
from shardproof.harness.engines.engine import Engine, RunRequest
from shardproof.harness.engines.interposer import Interposer
from shardproof.harness.engines.rank_environment import environment_of, in_environment, one_thread
from shardproof.harness.engines.starvation import LONGEST
from shardproof.harness.engines.threads.rank_state import own_state
from shardproof.harness.engines.threads.rank_threads import RankThread, do_nothing
from shardproof.harness.errors import NoNumbers, NotComputed, Position, RankRaised, RequestError, TimeLimit, error_text
from shardproof.harness.ledger import Observer
from shardproof.harness.torch_internals.backends import fake_store, meta_device

_REFUSED = re.compile(
    r"meta tensor|meta device|meta kernel|device[^\n]*\bmeta\b|\bmeta\b[^\n]*device|register_meta|'meta' backend"
    r"|INTERNAL ASSERT FAILED",
    re.IGNORECASE,
)
"""torch's errors if a tensor of the meta device has no data or meets one that has, or if an operator lacks that device.

Assertions in torch's C++ are among them: the reducer of DistributedDataParallel asserts results of works, and works of
the fake group have none.
"""
_TORCH = str(Path(torch.__file__).parent)
_GRACE_S = 5.0
"""How long a rank that was interrupted may take to end."""


class DryEngine(Engine):
    """Runs programs on ranks that do not communicate. `run` runs all of them, `run_ranks` those that are named."""

    name = "dry"
    remote = False

    def run_request(self, request: RunRequest, observer: Observer | None) -> list[Any]:
        """The results by rank; see Engine.run."""
        return self.run_ranks(request, range(request.world_size), *(() if observer is None else (observer,)))

    def run_ranks(self, request: RunRequest, ranks: Sequence[int], *observers: Observer) -> list[Any]:
        """The results on these ranks, in their order.

        The time limit is for each of them, in seconds of the processor; on the clock it may be ten times as long.
        Raises RequestError, NoNumbers, NotComputed, RankRaised or MachineError (a TimeLimit, or a feature that torch
        lacks).
        """
        self._require_open()
        for rank in ranks:
            if not 0 <= rank < request.world_size:
                raise RequestError(f"rank {rank}: must be below world_size {request.world_size}; legal: 0")
        if dist.is_initialized():
            rule = "torch.distributed is initialised in this process, and a dry rank brings a world of its own"
            raise RequestError(f"run: {rule}; legal: destroy_process_group() before")
        with one_thread(), meta_device(), ExitStack() as watching:
            if observers:
                watching.enter_context(Interposer(*observers))
            return [_result_of_rank(request, rank) for rank in ranks]


def _result_of_rank(request: RunRequest, rank: int) -> Any:
    """Result of one rank's program, run in a thread of its own. Raises TimeLimit, or what `_failure_of_rank` makes."""
    world_size, timeout_s = request.world_size, request.timeout_s
    results: list[Any] = []
    errors: list[BaseException] = []

    def job() -> Callable[[], None]:
        try:
            results.append(_in_world(request, rank))
        except BaseException as error:
            errors.append(error)
        return do_nothing

    thread = RankThread()
    thread.begin(f"rank {rank}", job)
    if not _join_thread(thread, timeout_s):
        thread.interrupt()
        stayed = () if thread.wait_for_end(_GRACE_S) else (rank,)
        text = f"rank {rank} of {world_size} did not end within {timeout_s:g} s"
        text += "; it is in native code and could not be interrupted: thread abandoned" if stayed else ""
        position = Position(rank=rank, state="runs", caller=place_raised(errors[0].__traceback__) if errors else "")
        raise TimeLimit(text, ranks=(rank,), positions=(position,), abandoned=stayed)
    thread.end()
    if errors:
        raise _failure_of_rank(errors[0], rank, world_size) from errors[0]
    return results[0]


def _join_thread(thread: RankThread, timeout_s: float) -> bool:
    """Wait for the end of the rank's job. Returns whether it came in time.

    The limit is of processor time, so that a busy machine causes no time-out. On the clock the rank may take ten times
    as long.
    """
    began_s, latest_s = time.process_time(), time.monotonic() + LONGEST * timeout_s
    while not thread.wait_for_end(min(1.0, timeout_s)):
        if time.process_time() - began_s > timeout_s or time.monotonic() > latest_s:
            return False
    return True


def _in_world(request: RunRequest, rank: int) -> Any:
    """Run the program as this rank; torch's random stream, modules, environment, world and excepthook are restored."""
    hook = sys.excepthook
    words = environment_of(rank, request.world_size, os.environ)
    with own_state(request.per_rank), torch.random.fork_rng(devices=()), in_environment(words):
        torch.manual_seed(request.seed)
        dist.init_process_group("fake", rank=rank, world_size=request.world_size, store=fake_store())
        try:
            return request.program(rank, *request.args)
        except SystemExit as end:
            if end.code:
                raise
            return None
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            sys.excepthook = hook  # torch wraps it each time in one that prefixes every line with the rank


def _failure_of_rank(error: BaseException, rank: int, world_size: int) -> NoNumbers | NotComputed | RankRaised:
    """The error of the run for an error of a rank: it read a number, or it raised."""
    if isinstance(error, NotComputed):
        return error
    place = place_raised(error.__traceback__)
    at = f", at {place}" if place else ""
    detail = error_text(error)
    position = Position(rank=rank, state="raised", detail=detail, caller=place)
    if _wants_numbers(error):
        text = (
            f"rank {rank} of {world_size} cannot go on with shapes alone{at}: {detail.partition('. ')[0]}; "
            "legal: --engine inproc, or code that needs no number when device.type is 'meta'"
        )
        return NoNumbers(text, ranks=(rank,), positions=(position,))
    text = f"rank {rank} of {world_size} raised {detail}{at}{what_led_to(error)}"
    return RankRaised(text, ranks=(rank,), positions=(position,))


def _wants_numbers(error: BaseException) -> bool:
    """Whether torch refused because a tensor of the meta device has no data, or because it met one that has.

    Also if torch's own code fails in an assertion or lacks a name: some of it was not made for this device.
    """
    if isinstance(error, RuntimeError | ValueError | TypeError):
        return bool(_REFUSED.search(str(error)))
    frames = traceback.extract_tb(error.__traceback__)
    return isinstance(error, AssertionError | AttributeError) and frames[-1].filename.startswith(_TORCH)
