"""The performance table: what the in-process engine and the recorder cost, measured here, side by side in one run.

Machines are shared and noisy, so every number that is compared is a ratio of runs that took turns. The workload is
`bench.workload`; an example is: draw weights, dense pass, all ranks, comparison with the dense pass.

    engine / bare ranks      the engine's ranks over the same rank mathematics without a collective, by world size
    peers / bare ranks       the same workload in the same rounds by torch's threaded process group and LocalTensorMode
    recorded / unrecorded    the same ranks with a recorder over the same without
    refused request          a command with a wrong word over `python -c pass`
    one case, further case   a run of one case on 2 ranks over `import torch`, and the time of each further case
    real widths              a proof at hidden 2048 over its ranks alone, in CPU time; not with --quick
    recorded program         a step of BERT-small under `shardproof record` over an unrecorded step, with the interval
                             of the ratio; not with --quick
    examples per second      in-process engine, pool engine (persistent gloo processes), processes spawned for each
                             example
"""

import argparse
import csv
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from bench.peers import PEERS, Peer
from bench.proof_costs import further_case, one_case, real_widths, recorded_step
from bench.workload import (
    Sizes,
    data,
    dense,
    largest_error,
    pooled_example,
    rank_program,
    require_right,
    spawned_example,
    weights,
)
from shardproof.harness.engines.processes.forked.pool import PoolEngine
from shardproof.harness.engines.threads.inproc import InprocEngine
from shardproof.harness.recording.recorder import Recorder
from shardproof.reports.printing.text import show_busy

ALLOWED_COST = 1.03
"""Largest ratio of a recorded step to a plain one."""
ALLOWED_ERROR = 1e-12
"""The largest error of an example. With a larger one the times would be those of another computation."""


class Row(NamedTuple):
    """A row of `bench.csv`: a value, and its ratio to what it is compared with.

    `value` and `ratio` are nan if the workload is refused; `versus` says why.
    """

    metric: str
    value: float
    unit: str
    versus: str
    ratio: float


def run_in_turns(runs: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """The seconds of every run in every round. The runs take turns, so that noise of the machine meets all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(rounds):
        for name, run in runs.items():
            start_s = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start_s)
    return seconds


def measure(*, rounds: int, spawns: int, quick: bool = False) -> list[Row]:
    """All rows: `rounds` of the short comparisons, `spawns` examples with processes spawned for each.

    `quick` leaves out the proof at real widths and the recorded program.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with InprocEngine() as engine:
            rows = [row for world_size in (2, 4, 8) for row in engine_rows(engine, world_size, rounds)]
            rows.append(_recorder_row(engine, rounds))
            for world_size in (2, 4):
                rows += _example_rows(engine, world_size, rounds, spawns)
        rows.append(_refused_row(max(rounds // 4, 1)))
        rows += _proof_rows(max(rounds // 8, 1), quick=quick)
        if not quick:
            rows.append(_program_row(max(rounds // 2, 4)))
    finally:
        torch.set_num_threads(threads)
    return rows


def engine_rows(engine: InprocEngine, world_size: int, rounds: int, peers: Mapping[str, Peer] = PEERS) -> list[Row]:
    """The engine and its peers over bare ranks, all in turns. The row of a peer that raises says what it refuses."""
    sizes = Sizes()
    full, (x, dy) = weights(sizes), data(sizes)
    runs: dict[str, Callable[[], object]] = {
        "bare": lambda: [rank_program(rank, world_size, sizes, full, x, dy, comm=False) for rank in range(world_size)],
        "engine": lambda: engine.run(rank_program, world_size, sizes, full, x, dy, world_size=world_size),
    }
    truth = dense(sizes, full, x, dy)
    refused = []
    for name, peer in peers.items():
        try:
            require_right([largest_error(peer(world_size, sizes, full, x, dy), truth)], ALLOWED_ERROR)
            runs[name] = partial(peer, world_size, sizes, full, x, dy)
        except (ImportError, RuntimeError, TypeError, AttributeError) as error:
            refused.append(Row(f"{name}, {world_size} ranks", math.nan, "ms", f"refuses it: {error}", math.nan))
    best = {name: min(times) for name, times in run_in_turns(runs, rounds).items()}
    bare_s = best.pop("bare")
    rows = [Row(f"{name}, {world_size} ranks", s * 1e3, "ms", "bare ranks", s / bare_s) for name, s in best.items()]
    return rows + refused


def _recorder_row(engine: InprocEngine, rounds: int) -> Row:
    """Recording over no recording on two ranks; the ratio is the median of the ratios of rounds."""
    sizes = Sizes()
    full, (x, dy) = weights(sizes), data(sizes)
    recorder = Recorder("", "", 2, {"tp": ((0, 1),)})

    def record_rank(rank: int) -> object:
        with recorder.on_rank(rank):
            return rank_program(rank, 2, sizes, full, x, dy)

    def on() -> None:
        with recorder:
            engine.run(record_rank, world_size=2, observer=recorder)

    def off() -> None:
        engine.run(rank_program, 2, sizes, full, x, dy, world_size=2)

    seconds = run_in_turns({"off": off, "on": on}, 3 * rounds)
    ratios = [on_s / off_s for on_s, off_s in zip(seconds["on"], seconds["off"], strict=True)]
    value = statistics.median(seconds["on"]) * 1e3
    return Row("recording, 2 ranks", value, "ms", "not recording", statistics.median(ratios))


def example(engine: InprocEngine, world_size: int, seed: int) -> None:
    """Run an example in the engine. Raises RuntimeError when it is wrong."""
    sizes = Sizes(seed=seed)
    full, (x, dy) = weights(sizes), data(sizes)
    truth = dense(sizes, full, x, dy)
    passed = engine.run(rank_program, world_size, sizes, full, x, dy, world_size=world_size)
    require_right([largest_error(passed, truth)], ALLOWED_ERROR)


def _example_rows(engine: InprocEngine, world_size: int, rounds: int, spawns: int) -> list[Row]:
    """Examples per second of three ways to run ranks; ratios are to spawning."""
    with PoolEngine() as pool:
        runs = {
            "engine": lambda: example(engine, world_size, 0),
            "pool": lambda: pooled_example(pool, world_size, 0, ALLOWED_ERROR),
        }
        seconds = run_in_turns(runs, rounds)
    seconds["spawn"] = [spawned_example(world_size, seed, ALLOWED_ERROR) for seed in range(spawns)]
    rates = {name: 1 / statistics.median(times) for name, times in seconds.items()}
    return [
        Row(f"{name}, {world_size} ranks", rate, "examples/s", "spawn", rate / rates["spawn"])
        for name, rate in rates.items()
    ]


def _refused_row(rounds: int) -> Row:
    """The wall time of a command that is refused for a wrong word, over that of a bare interpreter."""
    commands = {"pass": ("-c", "pass"), "refused": ("-m", "shardproof", "run", "mode=unknown")}
    runs = {
        name: partial(subprocess.run, [sys.executable, *words], check=False, capture_output=True)
        for name, words in commands.items()
    }
    best = {name: min(times) for name, times in run_in_turns(runs, rounds).items()}
    return Row("refused request", best["refused"] * 1e3, "ms", "python -c pass", best["refused"] / best["pass"])


def _proof_rows(rounds: int, *, quick: bool) -> list[Row]:
    """CPU time of proofs: one case over importing torch, a further case, and real widths over their ranks."""
    case_s, over_import = one_case(rounds)
    further_s = further_case(rounds)
    rows = [
        Row("one case, CPU time", case_s, "s", "import torch", over_import),
        Row("further case, CPU time", further_s, "s", "one case", further_s / case_s),
    ]
    if not quick:
        proof_s, over_ranks = real_widths()
        rows.append(Row("real widths, CPU time", proof_s, "s", "its ranks", over_ranks))
    return rows


def _program_row(pairs: int) -> Row:
    """A step of a program recorded as it is, over the same step unrecorded, with the interval of the ratio."""
    seconds, ratio = recorded_step(pairs)
    interval = f"{ratio.low:.2f} to {ratio.high:.2f}"
    open_ = f", {ALLOWED_COST} not resolvable here" if ratio.low <= ALLOWED_COST < ratio.high else ""
    versus = f"unrecorded step ({interval}{open_})"
    return Row("recorded program, CPU time", seconds * 1e3, "ms", versus, ratio.ratio)


def main(arguments: Sequence[str] = ()) -> int:
    """Measure, print the table and write `bench.csv`: what `shardproof bench` calls. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="shardproof bench", description="What the engine and the recorder cost, measured here."
    )
    parser.add_argument("--rounds", type=int, default=40, help="rounds of every comparison (40)")
    parser.add_argument("--out", type=Path, default=Path("runs") / "bench", help="folder of bench.csv (runs/bench)")
    parser.add_argument("--quick", action="store_true", help="without the proof at real widths")
    options = parser.parse_args(arguments)
    with show_busy("measuring in rounds: several minutes", sys.stderr):
        rows = measure(rounds=max(options.rounds, 1), spawns=2, quick=options.quick)
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / "bench.csv").open("w", newline="") as file:
        csv.writer(file).writerows([Row._fields, *rows])
    table = Table(*Row._fields, title="Measured here, side by side in one run")
    for row in rows:
        value, ratio = ("-" if math.isnan(number) else f"{number:.2f}" for number in (row.value, row.ratio))
        table.add_row(row.metric, value, row.unit, row.versus, ratio)
    Console().print(table)
    return 0
