"""Switches a witness on and off over one stretch of a rank's run: the torch profiler, and nsys's capture on a GPU.

The torch profiler leaves a Chrome trace and beside it the Flight Recorder's entries of the same stretch, which is
torch's own log of calls. They are written when the run is over, since that takes seconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from harness.torch_internals.tracing import default_store, distributed_header, flight_record
from harness.witnesses.torch_trace import FLIGHT_SUFFIX, TRACE_SUFFIX


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


class Tracing:
    """The torch profiler and the Flight Recorder over one stretch of this rank's run."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank, self._device = rank, device
        self._profile: profile | None = None
        self._entries: list[Mapping[str, Any]] = []

    @contextmanager
    def on(self) -> Iterator[None]:
        """The stretch."""
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        before = max((entry["record_id"] for entry in flight_record()), default=-1)
        with profile(activities=activities, record_shapes=True, with_stack=True) as traced:
            yield
            # Once more at the end: the header of the beginning lacks the groups that the body made.
            if header := distributed_header(traced):
                traced.add_metadata_json("distributedInfo", json.dumps(header))
        self._entries = [entry for entry in flight_record() if entry["record_id"] > before]
        self._profile = traced

    def write(self, folder: Path) -> None:
        """Write the Chrome trace and the entries."""
        if self._profile is not None:
            self._profile.export_chrome_trace(str(folder / f"rank{self._rank}{TRACE_SUFFIX}"))
            text = json.dumps({"entries": self._entries})
            (folder / f"rank{self._rank}{FLIGHT_SUFFIX}").write_text(text, encoding="utf-8")
