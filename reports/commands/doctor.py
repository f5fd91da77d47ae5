"""`shardproof doctor`: what this machine offers, what would be skipped here, and why.

`inspect` looks, `judge` turns what it saw into rows; nothing is started and nothing is changed.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

import nvtx
import torch
import torch.distributed as dist

from harness.torch_internals.lookup import TESTED, tested_span, untested
from harness.torch_internals.probes import PROBES, failing
from reports.printing.tables import Table
from reports.printing.text import show_table

__all__ = ["Machine", "inspect", "judge", "main"]

OLDEST_PYTHON = (3, 11)
PEERS = {
    "transformers": "skipped: tests that compare with Hugging Face models (extra `peers`)",
    "megatron-core": "skipped: tests that compare with Megatron-Core (extra `peers`)",
    "deepspeed": "a subject that imports it cannot run here",
}
"""Other implementations, and what follows when one is not installed."""
POOL = {
    "gloo": "--engine pool runs ranks as processes, which are kept and compared call by call",
    "nccl": "--engine pool --device cuda does so with a GPU a rank",
}
"""What a backend is good for when it is there."""
_PROFILED = "`run --profile nsys` rebuilds the ledger from its database; tests of it run"
_UNPROFILED = (
    "no Nsight Systems timelines: with `run --profile nsys` alone every case is unknown (exit status 1), beside torch "
    "a note says so; tests of it are skipped (.ci/nsys)"
)
Row = tuple[str, str, str, str]
"""What, found, "yes" or "no", and what follows from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What was seen: versions as text, "" for what is not installed; features of ours that this torch lacks."""

    python: str
    torch: str
    lacking: tuple[str, ...]
    nvtx: str
    nvtx_listener: bool
    backends: tuple[str, ...]
    gpus: tuple[str, ...]
    nsys: str
    peers: dict[str, str]
    cores: int


def main(arguments: argparse.Namespace) -> int:
    """Print the table; exit status 0, for a machine without a GPU is no error."""
    del arguments  # every command takes them; this one has none
    show_table(judge(inspect()), sys.stdout)
    return 0


def inspect() -> Machine:
    """Look at this machine."""
    available = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()} if dist.is_available() else {}
    return Machine(
        python=platform.python_version(),
        torch=torch.__version__,
        lacking=tuple(f"{probe.feature}: {probe.otherwise}" for probe in failing()),
        nvtx=_version("nvtx"),
        # Without a tool attached, nvtx hands out a domain that does nothing.
        nvtx_listener=type(nvtx.get_domain("shardproof")).__name__ != "DummyDomain",
        backends=tuple(name for name, there in available.items() if there),
        gpus=tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())),
        nsys=shutil.which("nsys") or "",
        peers={name: _version(name) for name in PEERS},
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
    )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def judge(machine: Machine) -> Table:
    """One row for each thing that matters: is it there, and what follows."""
    rows = (*_base(machine), *_devices(machine), *_tools(machine))
    missing = sum(there == "no" for _, _, there, _ in rows)
    note = f"{missing} of {len(rows)} are not here; of these, `shardproof run` needs python and torch only, and no GPU"
    return Table(title="This machine", headers=("what", "found", "usable", "what follows"), rows=rows, note=note)


def _base(machine: Machine) -> Iterator[Row]:
    python = _release(machine.python) >= OLDEST_PYTHON
    oldest = ".".join(map(str, OLDEST_PYTHON))
    yield "python", machine.python, _word(python), "" if python else f"too old: {oldest} or newer is needed"
    there, note = _release(machine.torch) >= TESTED[0], untested(machine.torch)
    yield "torch", machine.torch, _word(there), note or f"tested with {tested_span()}"
    lack = "; ".join(machine.lacking)
    works = f"all {len(PROBES)} features that use private names of torch work here"
    yield "torch internals", "some missing" if lack else "all there", _word(not lack), lack or works
    yield "cores", str(machine.cores), "yes", "one is enough: the ranks of the in-process engine take turns"


def _devices(machine: Machine) -> Iterator[Row]:
    for backend, offer in POOL.items():
        there = backend in machine.backends
        lack = f"no process groups over {backend}; the in-process engine does not need them"
        yield f"backend {backend}", backend if there else "-", _word(there), offer if there else lack
    gpus = ", ".join(machine.gpus)
    lack = "--device cuda is refused, tests marked `gpu` are skipped; everything else runs on the CPU"
    yield "GPU", gpus or "none", _word(bool(gpus)), "" if gpus else lack


def _tools(machine: Machine) -> Iterator[Row]:
    listens = "a tool listens: every run shows there" if machine.nvtx_listener else "no tool listens: ranges go nowhere"
    yield "nvtx", machine.nvtx or "-", _word(bool(machine.nvtx)), listens
    yield "nsys", machine.nsys or "-", _word(bool(machine.nsys)), _PROFILED if machine.nsys else _UNPROFILED
    for name, lack in PEERS.items():
        version = machine.peers[name]
        yield name, version or "-", _word(bool(version)), "" if version else lack


def _word(there: bool) -> str:
    return "yes" if there else "no"


def _release(version: str) -> tuple[int, int]:
    """(2, 13) of "2.13.0+cpu"."""
    major, minor = version.split(".")[:2]
    return int(major), int("".join(c for c in minor if c.isdigit()))
