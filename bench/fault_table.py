"""The fault table: what each engine makes of a rank that goes wrong, how soon, and in which words.

    shardproof bench --faults            prints the table and writes faults.csv

A fault is detected when the run ends in one error that has the words of the row's `says`; a run that returns is silent.
`allowed_ms` is the promised time: 50 ms in process, 1000 ms for a rank of the pool that died. Where only the clock can
show a fault, it is the time limit of the run and a second. In process, a rank that ends its process ends the caller's.
Such a row is run in a process of its own, and its ending is what is seen.
"""

import argparse
import csv
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench import fault_programs as programs
from shardproof.harness.engines.engine import Engine
from shardproof.harness.errors import MachineError, ProgramError
from shardproof.harness.resolve import resolve
from shardproof.harness.running.engines import engine_named
from shardproof.reports.printing.text import show_table
from shardproof.reports.printing.text_tables import Table

LIMIT_S = 1.0
"""Time limit of every run: the cost of a fault that only the clock can show."""
TRIES = 3
"""Runs of a fault that shows without the clock; the shortest counts, for the machine may be busy."""


class Fault(NamedTuple):
    """A way to go wrong; `says` is the words of a clear message of it.

    `clock`: only a time limit can show it; `fatal`: the program ends the process of its rank.
    """

    name: str
    program: Callable[[int], Any]
    says: str
    world_size: int = 3
    clock: bool = False
    fatal: bool = False


FAULTS = (
    Fault("a rank raises", programs.raises, "rank 1 of 3 raised ValueError: bad layer"),
    Fault("raises in backward", programs.raises_in_backward, "raised ValueError: bad gradient"),
    Fault("os._exit", programs.exits, "9", fatal=True),
    Fault("SIGKILL", programs.is_killed, "SIGKILL", fatal=True),
    Fault("hangs in native code", programs.hangs, "rank 1", clock=True),
    Fault("loops forever", programs.loops_forever, "rank 1", clock=True),
    Fault("skips a collective", programs.skips, "rank 1"),
    Fault("wrong order", programs.orders_differ, "the op is"),
    Fault("other numel", programs.numels_differ, "the shape is 4 on rank 1"),
    Fault("same numel, other shape", programs.shapes_differ, "the shape is 2x3 on rank 1"),
    Fault("other dtype", programs.dtypes_differ, "the dtype is int32 on rank 1"),
    Fault("other reduce op", programs.reduce_ops_differ, "the reduce op is max on rank 1"),
    Fault("other broadcast root", programs.roots_differ, "the root is 1 on rank 1"),
    Fault("all-to-all splits", programs.splits_differ, "all_to_all", 2),
    Fault("two groups crossed", programs.groups_cross, "all_reduce #0 of", 2),
)
"""Every row of the table."""


class Seen(NamedTuple):
    """A row of `faults.csv`: an engine's result for a fault. `message` is the first line of the error."""

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
    """Run the fault in this engine. Raises RuntimeError when it cannot run a right program afterwards."""
    tries: list[Seen] = []
    for _ in range(1 if fault.clock else TRIES):
        start_s = time.perf_counter()
        text, detected = "nothing: the run ended as if all were well", False
        try:
            engine.run(fault.program, world_size=fault.world_size, timeout_s=LIMIT_S)
        except (ProgramError, MachineError) as error:
            text, detected = str(error), fault.says in str(error)
        tries.append(_row(engine.name, fault, detected, time.perf_counter() - start_s, text))
    after = engine.run(programs.goes_right, world_size=fault.world_size)
    if after != [fault.world_size] * fault.world_size:
        raise RuntimeError(f"engine {engine.name} is not usable after {fault.name!r}: {after}")
    return max(tries, key=lambda row: (row.detected, -row.ms))


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


def _alone(program: str, name: str) -> int:
    """Run one program on three ranks and end as it ends; `_fatal` starts it."""
    found: Any = resolve(program)
    with engine_named(name) as engine:
        engine.run(programs.goes_right, world_size=3)
        print("begins", flush=True)
        engine.run(found, world_size=3, timeout_s=LIMIT_S)
    return 0


def _row(name: str, fault: Fault, detected: bool, took_s: float, text: str) -> Seen:
    allowed_ms = 1000.0 * (LIMIT_S + 1) if fault.clock else 50.0 if name == "inproc" and not fault.fatal else 1000.0
    return Seen(name, fault.name, detected, round(took_s * 1e3, 2), allowed_ms, "".join(text.splitlines()[:1]))


def main(arguments: Sequence[str] = ()) -> int:
    """Measure, print the table and write `faults.csv`: what `shardproof bench --faults` calls. 1 for a silent row."""
    parser = argparse.ArgumentParser(prog="shardproof bench --faults", description="The fault table, measured here.")
    parser.add_argument("--out", type=Path, default=Path("runs") / "bench", help="folder of faults.csv (runs/bench)")
    parser.add_argument("--engines", default="inproc,pool", help="engines, comma separated (inproc,pool)")
    parser.add_argument("--alone", metavar="M:O", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    names = options.engines.split(",")
    if options.alone:
        return _alone(options.alone, names[0])
    rows = measured(names, FAULTS)
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / "faults.csv").open("w", newline="") as file:
        csv.writer(file).writerows([Seen._fields, *rows])
    late = sum(row.late for row in rows)
    note = f"{sum(row.detected for row in rows)} of {len(rows)} detected"
    shown = tuple(
        (one.engine, one.fault, "yes" if one.detected else "no", f"{one.ms:.1f}", f"{one.allowed_ms:.0f}", one.message)
        for one in rows
    )
    headers = ("engine", "fault", "detected", "ms", "promised ms", "message")
    title, numbers = "What each engine makes of a fault, measured here", frozenset({3, 4})
    note += f", {late} later than promised" if late else ""
    show_table(Table(title=title, headers=headers, rows=shown, numbers=numbers, note=note), sys.stdout)
    return 0 if all(row.detected for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
