"""Messages of the driver and the worker of a rank: a run, and how it ended on the rank.

A message is a pickle in which dense tensors on the CPU are their bytes. torch's own way of sending tensors between
processes leaves files in shared memory behind when a process is killed.
"""

import copyreg
import io
import pickle
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardproof.harness.engines.engine import RunRequest
from shardproof.harness.engines.processes.rank_program import RankResult
from shardproof.harness.errors import RequestError, error_text
from shardproof.harness.ledger import Observer


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
    """Report of a rank on its run: a result, or a reason without one.

    `refused`: why the program could not be unpickled; `broken`: why there was no world to run it in. `unwaited` are the
    places, among the rank's asynchronous calls, of those that were never waited for. `kept_groups` is how many groups
    the process keeps connected; `reusable` is False when the program has left threads behind.
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
    pickler.dispatch_table = copyreg.dispatch_table | {Tensor: _reduced}
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
    except Exception as problem:  # whatever a user's own pickling raises
        rule = f"cannot be sent to the processes of the ranks ({error_text(problem)})"
        raise RequestError(f"program {request.program!r}: {rule}; legal: a function of a module") from problem


def pack_report(report: WorkerReport) -> bytes:
    """The report as bytes; a value that cannot be pickled becomes the RequestError of its rank."""
    try:
        return pack_value(report)
    except Exception as problem:  # whatever a user's own pickling raises
        rank = report.result.rank if report.result is not None else 0
        text = f"the result cannot be sent from the rank's process: {error_text(problem)}"
        return pack_value(replace(report, result=RankResult(rank=rank, error=RequestError(text), detail=text)))


def _reduced(tensor: Tensor) -> Any:
    """A dense tensor as its bytes; any other as torch pickles it."""
    if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
        return tensor.__reduce_ex__(2)
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    data: Any = plain.view(torch.uint8).numpy() if plain.numel() else None
    buffer = pickle.PickleBuffer(data) if data is not None else b""
    return _rebuilt, (tensor.dtype, tuple(tensor.shape), buffer, tensor.requires_grad)


def _rebuilt(dtype: torch.dtype, shape: tuple[int, ...], data: Any, requires_grad: bool) -> Tensor:
    flat = torch.frombuffer(data, dtype=dtype) if len(data) else torch.empty(0, dtype=dtype)
    return flat.reshape(shape).requires_grad_(requires_grad)
