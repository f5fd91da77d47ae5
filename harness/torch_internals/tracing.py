"""Torch's own logs of calls: the header of a profiler's trace, and the Flight Recorder; the store of the world."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d
from torch.profiler import profile

from harness.torch_internals.lookup import found, probe

default_store: Any = found(c10d, "_get_default_store", "waiting for all ranks without a call")
"""The store over which the ranks of the world met. Uses distributed_c10d._get_default_store."""


def distributed_header(traced: profile) -> Mapping[str, Any]:
    """The header of a trace on the world and its groups; {} where there is none. Uses profile._get_distributed_info."""
    header: Mapping[str, Any] = getattr(traced, "_get_distributed_info", dict)() or {}
    return header


def flight_record() -> list[Mapping[str, Any]]:
    """Torch's own log of calls, oldest first; [] where this torch keeps none.

    Uses torch._C._distributed_c10d._dump_fr_trace_json.
    """
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    if dump is None:
        return []
    entries: list[Mapping[str, Any]] = json.loads(dump(includeCollectives=True, onlyActive=False)).get("entries", [])
    return sorted(entries, key=lambda entry: int(entry["record_id"]))


@probe(
    "the Flight Recorder beside a torch trace",
    names="torch._C._distributed_c10d._dump_fr_trace_json",
    otherwise="`--profile torch` has the trace alone",
)
def _is_a_log() -> bool:
    return isinstance(flight_record(), list)
