"""A rank as a process: messages of the driver and its worker, its world for a run, and how its program ended.

The default group is new for every run, distinguished in the store by a prefix, and destroyed afterwards whatever
happened. NCCL communicates CUDA tensors where there is a GPU, gloo the rest. Times are seconds of the monotonic clock,
which the processes of a machine share.

A message is a pickle in which dense tensors on the CPU are their bytes. torch's own way of sending tensors between
processes leaves files in shared memory behind when a process is killed.
"""

import copyreg
import inspect
import io
import os
import pickle
import random
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from shardproof.harness.engines.calls.callers import place_raised, what_led_to
from shardproof.harness.engines.engine import Program, RunRequest
from shardproof.harness.engines.rank_environment import (
    environment_of,
    in_environment,
    require_own_world,
    use_one_thread,
)
from shardproof.harness.errors import RequestError, error_text
from shardproof.harness.ledger import Observer
from shardproof.harness.torch_internals.world import redirect_function

_SLACK_S = 30.0
"""How much longer than the run torch waits: the engine's own limit comes first and reports more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResult:
    """How a rank's program ended: with a value, or with an exception and where it was raised.

    `error` can be pickled; its notes have the traceback. `caller` is "file:line in function" of the user's code.
    `behind` is a clause on the exceptions that caused it.
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
    """Run the program as this rank of a new world over the store. Raises what torch raises if it makes no world."""
    with world(rank, world_size, store, timeout_s):
        seed_streams(seed)
        return result_of(program, args, rank)


@contextmanager
def world(rank: int, world_size: int, store: Any, timeout_s: float, local_rank: int | None = None) -> Iterator[None]:
    """torch.distributed initialised as this rank, on one thread; nothing of it remains afterwards."""
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
                with suppress(RuntimeError):  # a dead peer may have left broken connections
                    dist.destroy_process_group()


class _Adoption:
    """Replaces init_process_group in a program: its first call gets the existing world."""

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
    """Call the program on this rank. Returns how it ended; SystemExit with status 0 is an end without a value."""
    try:
        value = program(rank, *args)
    except BaseException as error:  # also SystemExit: it must not end the process unreported
        if isinstance(error, SystemExit) and not error.code:
            return RankResult(rank=rank, at_s=time.monotonic())
        place = place_raised(error.__traceback__)
        return RankResult(
            rank=rank,
            error=_as_portable_error(error, rank),
            detail=error_text(error),
            caller=place,
            behind=what_led_to(error),
            at_s=time.monotonic(),
        )
    return RankResult(rank=rank, value=value, at_s=time.monotonic())


def _as_portable_error(error: BaseException, rank: int) -> BaseException:
    """The exception, or a RuntimeError of the same text if it cannot be pickled; its traceback as a note."""
    lines = "".join(traceback.format_exception(error)).rstrip()
    try:
        sent: BaseException = pickle.loads(pickle.dumps(error))
        sent = error if type(sent) is type(error) else RuntimeError(error_text(error))
    except Exception:  # pickling a user's class may raise anything
        sent = RuntimeError(error_text(error))
    sent.add_note(f"on rank {rank}:\n{lines}")
    return sent


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOrder:
    """A run as one rank receives it. `program` is the packed pair of program and arguments.

    `number` identifies the run in all messages. Ranks meet in the store at `store`, host and port, which all runs
    share; `store_prefix` sets the keys of this one apart. The program runs in `folder`, with the import path `path`.
    `connection` changes when the processes of a run do: groups connected under another one are of no use.
    `local_rank` is the rank's number on its machine, None when all ranks are on this one. The agent of a launched rank
    fills in its own `store`, `folder`, `path` and `local_rank`.
    """

    number: int
    rank: int = 0
    world_size: int
    seed: int
    program: bytes
    store: tuple[str, int] = ("", 0)
    store_prefix: str
    connection: int
    folder: str = ""
    path: tuple[str, ...] = ()
    local_rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """The report of a rank on its run: a result, or the reason why there is none.

    `refused`: why the program could not be unpickled; `broken`: why there was no world to run it in. `unwaited` are the
    places, among the rank's asynchronous calls, of those that were never waited for. `kept_groups` is how many groups
    the process keeps connected; `reusable` is False if the program has left threads.
    """

    number: int
    result: RankResult | None = None
    refused: str = ""
    broken: str = ""
    unwaited: tuple[int, ...] = ()
    kept_groups: int = 0
    reusable: bool = True


class Standing(NamedTuple):
    """Where a rank stands: whether its innermost frame waits for a call, and the user's line and stack if known.

    `stopped`: whether a signal has stopped its process. `compiles`: whether torch's compiler is at work.
    """

    in_wait: bool = False
    caller: str = ""
    stack: tuple[str, ...] = ()
    stopped: bool = False
    compiles: bool = False


def pack_value(value: object) -> bytes:
    """A value as bytes. Raises what pickling raises."""
    stream = io.BytesIO()
    pickler = pickle.Pickler(stream, protocol=5)
    pickler.dispatch_table = copyreg.dispatch_table | {Tensor: _pickle_as_bytes}
    pickler.dump(value)
    return stream.getvalue()


def unpack_value(message: bytes | bytearray) -> Any:
    """The value of these bytes. Raises what unpickling raises."""
    return pickle.loads(message)


def pack_program(request: RunRequest, observer: Observer | None) -> bytes:
    """The program and its arguments as bytes.

    Raises RequestError when they cannot be pickled, or when there is an observer: ranks run in other processes.
    """
    if observer is not None:
        raise RequestError(
            "observer: ranks are other processes; legal: one that observes there (harness.running.ranks.execution)"
        )
    try:
        return pack_value((request.program, request.args))
    except Exception as problem:  # pickling a user's class may raise anything
        rule = f"cannot be sent to the processes of the ranks ({error_text(problem)})"
        raise RequestError(f"program {request.program!r}: {rule}; legal: a function of a module") from problem


def pack_report(report: WorkerReport) -> bytes:
    """The report as bytes; a value that cannot be pickled becomes the RequestError of its rank."""
    try:
        return pack_value(report)
    except Exception as problem:  # pickling a user's class may raise anything
        rank = report.result.rank if report.result is not None else 0
        text = f"the result cannot be sent from the rank's process: {error_text(problem)}"
        return pack_value(replace(report, result=RankResult(rank=rank, error=RequestError(text), detail=text)))


def _pickle_as_bytes(tensor: Tensor) -> Any:
    """A dense tensor as its bytes; any other as torch pickles it."""
    if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
        return tensor.__reduce_ex__(2)
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    data: Any = plain.view(torch.uint8).numpy() if plain.numel() else None
    buffer = pickle.PickleBuffer(data) if data is not None else b""
    return _rebuild_tensor, (tensor.dtype, tuple(tensor.shape), buffer, tensor.requires_grad)


def _rebuild_tensor(dtype: torch.dtype, shape: tuple[int, ...], data: Any, requires_grad: bool) -> Tensor:
    flat = torch.frombuffer(data, dtype=dtype) if len(data) else torch.empty(0, dtype=dtype)
    return flat.reshape(shape).requires_grad_(requires_grad)
