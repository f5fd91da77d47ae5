"""The fault table: what each engine makes of a rank that goes wrong, how soon, and in which words.

    shardproof bench --faults            prints the table and writes faults.csv

A fault is detected when the run ends in one error that says what the row's `says` says; a run that returns is silent.
`allowed_ms` is what is promised: 50 ms in process, 1000 ms for a rank of the pool that died, and the time limit of the
run, and a second, where only the clock can tell. In process, a rank that ends its process ends the caller's: that row
is run in a process of its own, and what is seen is how that one ended.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

from bench import fault_programs as programs
from harness.engines.engine import Engine
from harness.engines.named import ENGINES, engine_named
from harness.errors import MachineError, ProgramError
from harness.resolve import resolve
from reports.printing.tables import Table
from reports.printing.text import show_table

LIMIT_S = 1.0
"""The time limit of every run: what a fault that only the clock can tell costs."""
TRIES = 3
"""Runs of a fault that is told without the clock; the shortest counts, for the machine may be busy."""
_PROGRAM_MS, _DEAD_MS, _CLOCK_MS = 50.0, 1000.0, 1000.0 * (LIMIT_S + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One way to go wrong; `says` is what a clear message of it contains. `clock`: only a time limit can tell."""

    name: str
    program: Callable[[int], Any]
    says: str
    world_size: int = 3
    clock: bool = False
    fatal: bool = False
    """Whether the program ends the process of its rank."""


FAULTS = (
    Fault(name="a rank raises", program=programs.raises, says="rank 1 of 3 raised ValueError: bad layer"),
    Fault(name="raises in backward", program=programs.raises_in_backward, says="raised ValueError: bad gradient"),
    Fault(name="os._exit", program=programs.exits, says="9", fatal=True),
    Fault(name="SIGKILL", program=programs.is_killed, says="SIGKILL", fatal=True),
    Fault(name="hangs in native code", program=programs.hangs, says="rank 1", clock=True),
    Fault(name="loops forever", program=programs.loops_forever, says="rank 1", clock=True),
    Fault(name="skips a collective", program=programs.skips, says="rank 1"),
    Fault(name="wrong order", program=programs.orders_differ, says="the op is"),
    Fault(name="other numel", program=programs.numels_differ, says="the shape is 4 on rank 1"),
    Fault(name="same numel, other shape", program=programs.shapes_differ, says="the shape is 2x3 on rank 1"),
    Fault(name="other dtype", program=programs.dtypes_differ, says="the dtype is int32 on rank 1"),
    Fault(name="other reduce op", program=programs.reduce_ops_differ, says="the reduce op is max on rank 1"),
    Fault(name="other broadcast root", program=programs.roots_differ, says="the root is 1 on rank 1"),
    Fault(name="all-to-all splits", program=programs.splits_differ, says="all_to_all", world_size=2),
    Fault(name="two groups crossed", program=programs.groups_cross, says="all_reduce #0 of", world_size=2),
)
"""Every row of the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One row of `faults.csv`: what an engine made of a fault. `message` is the first line of what was told."""

    engine: str
    fault: str
    detected: bool
    ms: float
    allowed_ms: float
    message: str

    @property
    def late(self) -> bool:
        """Whether it took longer than promised."""
        return self.ms > self.allowed_ms


def measured(names: Sequence[str], faults: Sequence[Fault]) -> list[Seen]:
    """These rows for these engines, which are words of the command line."""
    rows: list[Seen] = []
    for name in names:
        with engine_named(name) as engine:
            for world_size in (2, 3):
                engine.run(programs.goes_right, world_size=world_size)  # the first backward of a process imports much
            rows += [
                _fatal(name, fault) if fault.fatal and name == "inproc" else seen(engine, fault) for fault in faults
            ]
    return rows


def seen(engine: Engine, fault: Fault) -> Seen:
    """What this engine makes of a fault. Raises RuntimeError when it cannot run a right program afterwards."""
    best: Seen | None = None
    for _ in range(1 if fault.clock else TRIES):
        start_s = time.perf_counter()
        text, detected = "nothing: the run ended as if all were well", False
        try:
            engine.run(fault.program, world_size=fault.world_size, timeout_s=LIMIT_S)
        except (ProgramError, MachineError) as error:
            text, detected = str(error), fault.says in str(error)
        row = _row(engine.name, fault, detected, time.perf_counter() - start_s, text)
        best = row if best is None or (row.detected, -row.ms) > (best.detected, -best.ms) else best
    after = engine.run(programs.goes_right, world_size=fault.world_size)
    if after != [fault.world_size] * fault.world_size or best is None:
        raise RuntimeError(f"engine {engine.name} is not usable after {fault.name!r}: {after}")
    return best


def _fatal(name: str, fault: Fault) -> Seen:
    """In process, a rank that ends its process: seen from outside, as pytest-xdist and a shell see it."""
    program = f"{fault.program.__module__}:{fault.program.__name__}"
    arguments = [sys.executable, "-m", __spec__.name, "--alone", program, "--engines", name]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        child.stdout.readline()  # it begins now
        start_s = time.perf_counter()
        status = child.wait(60)
        took_s = time.perf_counter() - start_s
    how = f"killed by signal {-status} (SIGKILL)" if status == -9 else f"status {status}"
    text = f"the process of the caller and all its ranks ended: {how}"
    return _row(name, fault, fault.says in how and status != 0, took_s, text)


def _alone(program: str, name: str, world_size: int = 3) -> int:
    """Run one program and end as it ends: what `_fatal` starts."""
    found: Any = resolve(program)
    with engine_named(name) as engine:
        engine.run(programs.goes_right, world_size=world_size)
        print("begins", flush=True)
        engine.run(found, world_size=world_size, timeout_s=LIMIT_S)
    return 0


def _row(name: str, fault: Fault, detected: bool, took_s: float, text: str) -> Seen:
    allowed_ms = _CLOCK_MS if fault.clock else _PROGRAM_MS if name == "inproc" and not fault.fatal else _DEAD_MS
    message = text.splitlines()[0] if text else ""
    ms = round(took_s * 1e3, 2)
    return Seen(engine=name, fault=fault.name, detected=detected, ms=ms, allowed_ms=allowed_ms, message=message)


def main(arguments: Sequence[str] = ()) -> int:
    """Measure, print the table and write `faults.csv`: what `shardproof bench --faults` calls. 1 for a silent row."""
    parser = argparse.ArgumentParser(prog="shardproof bench --faults", description="The fault table, measured here.")
    parser.add_argument("--out", type=Path, default=Path("runs") / "bench", help="folder of faults.csv (runs/bench)")
    known = ",".join(name for name in ("inproc", "pool") if name in ENGINES)
    parser.add_argument("--engines", default=known, help=f"engines, comma separated ({known})")
    parser.add_argument("--alone", metavar="M:O", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    names = options.engines.split(",")
    if options.alone:
        return _alone(options.alone, names[0])
    rows = measured(names, FAULTS)
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / "faults.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([field.name for field in fields(Seen)])
        writer.writerows(astuple(row) for row in rows)
    show_table(_table(rows), sys.stdout)
    return 0 if all(row.detected for row in rows) else 1


def _table(rows: Sequence[Seen]) -> Table:
    late = sum(row.late for row in rows)
    return Table(
        title="What each engine makes of a fault, measured here",
        headers=("engine", "fault", "detected", "ms", "promised ms", "message"),
        rows=tuple(
            (
                row.engine,
                row.fault,
                "yes" if row.detected else "no",
                f"{row.ms:.1f}",
                f"{row.allowed_ms:.0f}",
                row.message,
            )
            for row in rows
        ),
        numbers=frozenset({3, 4}),
        note=f"{sum(row.detected for row in rows)} of {len(rows)} detected"
        + (f", {late} later than promised" if late else ""),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
