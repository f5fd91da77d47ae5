"""Real and fake backends: torch's fake group and its work, waits for works, the store of the world.

Also torch's own logs of calls: the header of a profiler's trace and the Flight Recorder.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from shardproof.harness.torch_internals.lookup import found, lacking, standing

_internals: Any = torch._C._distributed_c10d
_WAITS = ("wait", "synchronize", "block_current_stream", "get_future", "get_future_result")
"""The methods of a work by which a program waits for it, or takes what it will wait for."""


def fake_store() -> Any:
    """A store for a world of one process without communication; registers torch's backend "fake".

    Uses torch.testing._internal.distributed.fake_pg. Raises MachineError where torch lacks it.
    """
    try:
        # Importing it registers the backend, for every kind of device.
        from torch.testing._internal.distributed import fake_pg  # noqa: PLC0415
    except ImportError as problem:
        raise lacking("the dry engine", "torch.testing._internal.distributed.fake_pg") from problem
    return fake_pg.FakeStore()


def fake_group() -> dist.ProcessGroup:
    """A private group of one rank, which no table of torch holds and whose calls move nothing.

    Uses torch._C._distributed_c10d.FakeProcessGroup and ProcessGroup._register_backend. Raises MachineError where torch
    lacks them.
    """
    kind = getattr(_internals, "FakeProcessGroup", None)
    if kind is None:
        raise lacking("recording on real backends", "torch._C._distributed_c10d.FakeProcessGroup")
    group = dist.ProcessGroup(dist.HashStore(), 0, 1)
    backend = kind._create_internal(0, 1)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, backend)
    return group


@contextmanager
def waits_of_fakes(waited_for: Callable[[int], None]) -> Iterator[None]:
    """Within it `waited_for(id of the work)` is called before every wait for a work of the fake group.

    Uses torch._C._distributed_c10d.FakeWork. Raises MachineError where torch lacks it.
    """
    kind: Any = getattr(_internals, "FakeWork", None)
    if kind is None:
        raise lacking("timelines of dry runs", "torch._C._distributed_c10d.FakeWork")
    with _telling(kind, ("wait",), waited_for):
        yield


@contextmanager
def waits_of_works(waited_for: Callable[[int], None]) -> Iterator[None]:
    """Within it `waited_for(id of the work)` is called before every wait for a work of a backend, and for what amounts
    to one. Wraps methods of torch.distributed.Work, which has to be a class that can be changed.
    """
    with _telling(dist.Work, _WAITS, waited_for):
        yield


@contextmanager
def _telling(kind: Any, names: Iterable[str], waited_for: Callable[[int], None]) -> Iterator[None]:
    """Within it these methods of a class of works, as far as it has them, call `waited_for(id of the work)` first."""

    def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
        def wait(work: Any, *args: Any, **words: Any) -> Any:
            waited_for(id(work))
            return original(work, *args, **words)

        return wait

    with ExitStack() as undo:
        for name in names:
            if hasattr(kind, name):
                undo.enter_context(standing(kind, name, wrapped(getattr(kind, name))))
        yield


default_store: Any = found(c10d, "_get_default_store", "waiting for all ranks without a call")
"""The store over which the ranks of the world met. Uses distributed_c10d._get_default_store."""


def distributed_header(traced: Any) -> Mapping[str, Any]:
    """The header of a trace on the world and its groups; {} where there is none. Uses profile._get_distributed_info."""
    header: Mapping[str, Any] = getattr(traced, "_get_distributed_info", dict)() or {}
    return header


def flight_record() -> list[Mapping[str, Any]]:
    """Torch's own log of calls, oldest first; [] where this torch keeps none.

    Uses torch._C._distributed_c10d._dump_fr_trace_json.
    """
    dump = getattr(_internals, "_dump_fr_trace_json", None)
    if dump is None:
        return []
    entries: list[Mapping[str, Any]] = json.loads(dump(includeCollectives=True, onlyActive=False)).get("entries", [])
    return sorted(entries, key=lambda entry: int(entry["record_id"]))
