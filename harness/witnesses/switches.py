"""Switches a witness on and off over one stretch of a rank's run: the torch profiler, and nsys's capture on a GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from harness.torch_internals.tracing import default_store, distributed_header, flight_record


@contextmanager
def captured(device: torch.device) -> Iterator[None]:
    """nsys's capture range on a GPU: from cudaProfilerStart to Stop, all ranks at once."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.profiler.start()
    _together("started")
    try:
        yield
    finally:
        _together("ended")  # the first rank to stop ends the capture for all
        torch.cuda.profiler.stop()


def _together(what: str) -> None:
    """Wait until every rank is here, by the store: a barrier would be a call that witnesses see."""
    store, ranks = default_store(), range(dist.get_world_size())
    store.set(f"{what}/{dist.get_rank()}", "")
    store.wait([f"{what}/{rank}" for rank in ranks])


class TorchTrace:
    """The torch profiler over the stretch for which it is entered, and beside it torch's own log of the same calls (its
    Flight Recorder). Both are written later, since that takes seconds.
    """

    def __init__(self, *, cuda: bool, stacks: bool = False) -> None:
        self._cuda, self._stacks = cuda, stacks
        self._header: Mapping[str, Any] = {}
        self._entries: list[Mapping[str, Any]] = []

    def __enter__(self) -> Self:
        self._before = max((int(entry["record_id"]) for entry in flight_record()), default=-1)
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._cuda else [])]
        self._profile = profile(activities=kinds, record_shapes=True, with_stack=self._stacks)
        self._profile.start()
        return self

    def note_groups(self) -> None:
        """Note the groups that there are now: what the profiler wrote at its start lacks those made since."""
        self._header = distributed_header(self._profile) or self._header  # the world may be destroyed by now

    def __exit__(self, *_: object) -> None:
        self.note_groups()
        if self._header:
            self._profile.add_metadata_json("distributedInfo", json.dumps(self._header))
        self._profile.stop()
        self._entries = [entry for entry in flight_record() if int(entry["record_id"]) > self._before]

    def write(self, trace: Path, flight: Path) -> None:
        """Write the Chrome trace and the entries of the Flight Recorder."""
        self._profile.export_chrome_trace(str(trace))
        flight.write_text(json.dumps({"entries": self._entries}), encoding="utf-8")
