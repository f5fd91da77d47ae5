"""`shardproof doctor`: what this machine offers, what would be skipped here, and why.

`inspect_machine` collects facts, `judge_machine` makes rows of them; nothing is started or changed. Anything missing or
broken is a row: `inspect_machine` imports the packages that shardproof needs, and a row has the error of its import.
"""

import argparse
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module, metadata
from typing import Any, TypeVar

from shardproof.harness.errors import error_text

T = TypeVar("T")
OLDEST_PYTHON = (3, 11)
NEEDED = ("numpy", "pandas", "rich", "matplotlib", "hypothesis", "pytest")
"""Packages that shardproof imports beside torch and nvtx."""
PEERS = {
    "transformers": "skipped: tests that compare with Hugging Face models (extra `peers`)",
    "megatron-core": "skipped: tests that compare with Megatron-Core (extra `peers`)",
    "deepspeed": "a subject that imports it cannot run here",
}
"""Other implementations, and the consequence of a missing one."""
CHECKOUTS = {"PICOTRON": "picotron", "NANOTRON": "nanotron", "INTERNEVO": "InternEvo"}
"""Variables that name checkouts, and the systems that are imported from them."""
POOL = {
    "gloo": "--engine pool runs ranks as processes, which are kept and compared call by call",
    "nccl": "--engine pool --device cuda does so with a GPU a rank",
}
"""What an available backend is used for."""
_PROFILED = "`run --profile nsys` rebuilds the ledger from its database; tests of it run"
_UNPROFILED = (
    "no Nsight Systems timelines: with `run --profile nsys` alone every case is unknown (exit status 1), beside torch "
    "a note says so; tests of it are skipped (.ci/nsys)"
)
Row = tuple[str, str, str, str]
"""Subject, found, "yes" or "no", and the consequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Facts of a machine: versions as text, "" for what is not installed.

    `problems`: what could not be inspected -> the error; `torch_note` says whether this torch was tested.
    """

    python: str
    torch: str
    nvtx: str
    nvtx_listener: bool
    backends: tuple[str, ...]
    gpus: tuple[str, ...]
    nsys: str
    peers: dict[str, str]
    checkouts: dict[str, str]
    cores: int
    torch_note: str = ""
    problems: dict[str, str] = field(default_factory=dict)


def main(arguments: argparse.Namespace) -> int:
    """Print the table; exit status 0, for a machine without a GPU is no error."""
    del arguments  # an option of every command, without effect here
    words = {"title": "This machine", "headers": ("what", "found", "usable", "what follows")}
    rows, note = judge_machine(inspect_machine())
    try:  # tables need pandas, and terminals rich, which may be missing themselves
        tables, text = (
            import_module("shardproof.reports.printing.text_tables"),
            import_module("shardproof.reports.printing.text"),
        )
        text.show_table(tables.Table(**words, rows=rows, note=note), sys.stdout)
    except (Exception, SystemExit):
        print("\n".join([*("  ".join(row).rstrip() for row in rows), note]))
    return 0


def inspect_machine() -> Machine:
    """Look at this machine."""
    problems: dict[str, str] = {}

    def look_for(what: str, ask: Callable[[], T], otherwise: T) -> T:
        try:
            return ask()
        except KeyboardInterrupt:
            raise
        except BaseException as problem:  # importing a broken package may raise anything, sys.exit too
            problems.setdefault(what, error_text(problem))
            return otherwise

    for name in NEEDED:
        look_for(name, lambda name=name: import_module(name), None)  # type: ignore[misc]
    version = look_for("torch", lambda: str(import_module("torch").__version__), "")
    return Machine(
        python=platform.python_version(),
        torch=version,
        torch_note=look_for("torch", lambda: _torch_note(version), "") if version else "",
        nvtx=_installed_version("nvtx"),
        nvtx_listener=look_for("nvtx", _is_tool_listening, False),
        backends=look_for("torch.distributed", _list_backends, ()) if version else (),
        gpus=look_for("GPU", _list_gpus, ()) if version else (),
        nsys=shutil.which("nsys") or "",
        peers={name: _installed_version(name) for name in PEERS},
        checkouts={name: os.environ.get(name, "") for name in CHECKOUTS},
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        problems=problems,
    )


def _torch_note(version: str) -> str:
    from shardproof.harness.torch_internals import lookup  # noqa: PLC0415  (where torch is missing, a problem of its row)

    import_module("shardproof.harness.torch_internals.autograd")  # torch may be installed in part
    if _parse_release(version) < lookup.TESTED[0]:
        return f"too old: {lookup.untested_note(version)}"
    return lookup.untested_note(version) or f"tested with {lookup.tested_span()}"


def _is_tool_listening() -> bool:
    """Whether a profiler listens: without one, nvtx gives out a domain that does nothing."""
    return type(import_module("nvtx").get_domain("shardproof")).__name__ != "DummyDomain"


def _list_backends() -> tuple[str, ...]:
    dist: Any = import_module("torch.distributed")
    if not dist.is_available():
        return ()
    available = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    return tuple(name for name, there in available.items() if there)


def _list_gpus() -> tuple[str, ...]:
    cuda: Any = import_module("torch").cuda
    return tuple(cuda.get_device_name(number) for number in range(cuda.device_count()))


def _installed_version(package: str) -> str:
    try:
        return str(metadata.version(package))
    except Exception:  # not installed, or installed in part: without its metadata
        return ""


def judge_machine(machine: Machine) -> tuple[tuple[Row, ...], str]:
    """A row for each thing that matters: is it there, and the consequence. Then the line below the rows."""
    rows = (*_judge_base(machine), *_judge_devices(machine), *_judge_tools(machine))
    missing = sum(there == "no" for _, _, there, _ in rows)
    note = f"{missing} of {len(rows)} are not here; `shardproof run` needs python, torch, nvtx and packages, and no GPU"
    return rows, note


def _judge_base(machine: Machine) -> Iterator[Row]:
    python = _parse_release(machine.python) >= OLDEST_PYTHON
    oldest = ".".join(map(str, OLDEST_PYTHON))
    yield "python", machine.python, _word_for(python), "" if python else f"too old: {oldest} or newer is needed"
    broken = machine.problems.get("torch", "")
    usable = bool(machine.torch) and not broken and not machine.torch_note.startswith("too old")
    yield (
        "torch",
        machine.torch or "-",
        _word_for(usable),
        f"cannot be used: {broken}" if broken else machine.torch_note,
    )
    lost = {name: machine.problems[name] for name in NEEDED if name in machine.problems}
    problems = "; ".join(f"{name}: {problem}" for name, problem in lost.items())
    yield "packages", "some missing" if lost else "all there", _word_for(not lost), problems or ", ".join(NEEDED)
    yield "cores", str(machine.cores), "yes", "one is enough: the ranks of the in-process engine take turns"


def _judge_devices(machine: Machine) -> Iterator[Row]:
    for backend, offer in POOL.items():
        there = backend in machine.backends
        lack = f"no process groups over {backend}; the in-process engine does not need them"
        lack = machine.problems.get("torch.distributed", lack)
        yield f"backend {backend}", backend if there else "-", _word_for(there), offer if there else lack
    gpus = ", ".join(machine.gpus)
    lack = "--device cuda is refused, tests marked `gpu` are skipped; everything else runs on the CPU"
    yield "GPU", gpus or "none", _word_for(bool(gpus)), "" if gpus else machine.problems.get("GPU", lack)


def _judge_tools(machine: Machine) -> Iterator[Row]:
    listens = "a tool listens: every run shows there" if machine.nvtx_listener else "no tool listens: ranges go nowhere"
    broken = machine.problems.get("nvtx", "")
    there = bool(machine.nvtx) and not broken
    yield "nvtx", machine.nvtx or "-", _word_for(there), f"cannot be used: {broken}" if broken else listens
    yield "nsys", machine.nsys or "-", _word_for(bool(machine.nsys)), _PROFILED if machine.nsys else _UNPROFILED
    for name, lack in PEERS.items():
        version = machine.peers[name]
        yield name, version or "-", _word_for(bool(version)), "" if version else lack
    for variable, system in CHECKOUTS.items():
        folder = machine.checkouts[variable]
        there, lack = os.path.isdir(folder), f"names no checkout: the subject of {system} cannot run here"
        yield variable, folder or "-", _word_for(there), "" if there else lack


def _word_for(there: bool) -> str:
    return "yes" if there else "no"


def _parse_release(version: str) -> tuple[int, ...]:
    """(2, 13) of "2.13.0+cpu"; 0 for what is no number."""
    digits = ("".join(char for char in part if char.isdigit()) for part in version.split(".")[:2])
    return tuple(int(part or 0) for part in digits)
