"""Cost of watching a step: two ranks on gloo train a small transformer, watched and unwatched in turns.

    recording + nvtx   recorder and interposer; every range is drawn when a tool listens, so under nsys
    CommDebugMode      torch.distributed.tensor.debug
    torch profiler     CPU activities with shapes and stacks, as in a session

Ratios are the medians of the rounds' own, on the slower rank: by the clock, and by the CPU time of the rank's thread.
On a busy machine neither means much. Microseconds an event, a step's cost over a rank's events in it, serve for larger
layers or fewer calls than CASE. Entering and leaving a witness is not timed. `python -m bench.witnesses FOLDER ROUNDS
[WITNESS ...]` is the measured process.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import multiprocessing
from torch.distributed import FileStore
from torch.distributed.tensor.debug import CommDebugMode
from torch.profiler import ProfilerActivity, profile

from shardproof.harness.engines.interposer import observe_calls
from shardproof.harness.engines.processes.rank_program import world
from shardproof.harness.errors import MachineError
from shardproof.harness.recording.ranges import attached_ranges
from shardproof.harness.recording.recorder import Recorder
from shardproof.harness.traces.nsys_export import database_of, nsys_path
from shardproof.parallel.communication.batch import deliver
from shardproof.parallel.communication.layout import Mesh
from shardproof.parallel.subject import scheme_of
from shardproof.parallel.training import set_up
from shardproof.reference.case import Case

CASE = "mode=tp tp=2 layers=4 hidden=512 heads=8 kv_heads=8 ffn=2048 seq=512 batch=2 dtype=float32"
"""A small transformer: four layers of 512 and sequences of 512, the shape of BERT-small (Turc et al. 2019)."""
LIMIT_S = 900.0
Pair = tuple[float, float]
STEPS = 2
"""Steps that are timed at a time."""
RECORDING = "recording + nvtx"
ONCE = "CommDebugMode"
"""A second forward of a module inside of it raises IndexError (pytorch#191392)."""
WITNESSES = (RECORDING, ONCE, "torch profiler")
Spent = Mapping[str, list[tuple[float, float]]]
"""By witness: seconds by the clock and of CPU, one pair a round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Cost of a witness: seconds of a step, its ratios to the unwatched step by the clock and by the thread's CPU time.

    `clock_us` and `cpu_us` are the microseconds that it adds to each event of a step.
    """

    witness: str
    seconds: float
    by_clock: float
    by_cpu: float
    clock_us: float
    cpu_us: float


def measure_costs(rounds: int) -> tuple[list[Cost], str]:
    """The costs, nsys among them, or why it is not."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = [sys.executable, "-m", "bench.witnesses", name, str(rounds)]
        subprocess.run(
            [*words, *WITNESSES], check=True, timeout=LIMIT_S, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        costs = [_cost(folder, witness) for witness in WITNESSES]
        if nsys_path() is None:
            return costs, "nsys is not on PATH"
        try:
            database_of([*words, RECORDING], folder, device="cpu", timeout_s=LIMIT_S, environment=os.environ)
        except MachineError as error:
            return costs, str(error)
        return [*costs, replace(_cost(folder, RECORDING), witness="nsys")], ""


def _cost(folder: Path, witness: str) -> Cost:
    """The cost of a witness, from what the ranks left in a folder."""
    left = [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]
    return cost_of([rank["spent"] for rank in left], witness, left[0]["events"])


def cost_of(ranks: Sequence[Spent], witness: str, events: int) -> Cost:
    """Cost of a witness from the time of both ranks; a rank issues `events` events a step."""

    def slower(name: str, which: int) -> list[float]:
        return [max(one[which], other[which]) for one, other in zip(*(rank[name] for rank in ranks), strict=True)]

    def pairs(which: int) -> list[tuple[float, float]]:
        return list(zip(slower(witness, which), slower("off", which), strict=True))

    def ratio(which: int) -> float:
        return statistics.median(watched / off for watched, off in pairs(which))

    def added_us(which: int) -> float:
        return statistics.median(watched - off for watched, off in pairs(which)) / STEPS / events * 1e6

    return Cost(
        witness=witness,
        seconds=statistics.median(slower(witness, 0)) / STEPS,
        by_clock=ratio(0),
        by_cpu=ratio(1),
        clock_us=added_us(0),
        cpu_us=added_us(1),
    )


def _rank(rank: int, folder: Path, rounds: int, witnesses: Sequence[str]) -> None:
    """Run every witness in turns, on one rank."""
    case = Case.parse(CASE)
    with world(rank, 2, FileStore(str(folder / f"store{os.getppid()}"), 2), LIMIT_S):
        step = micro_batch(case)
        for _ in range(3):
            step()
        spent: dict[str, list[Pair]] = {name: [] for name in ("off", *witnesses)}
        for _ in range(rounds):
            for name, pairs in spent.items():
                pairs.append(_measure_seconds(step, partial(_watch_body, name, rank, case), once=name == ONCE))
        left = {"spent": spent, "events": _events(step, rank, case)}
    (folder / f"{rank}.json").write_text(json.dumps(left), encoding="utf-8")


def _events(step: Callable[[], None], rank: int, case: Case) -> int:
    """How many events this rank issues in a step."""
    with Recorder("", case.mode, 2, case.axes) as recorder, observe_calls(recorder), recorder.on_rank(rank):
        step()
    return len(recorder.events())


def _measure_seconds(
    step: Callable[[], None], watched: Callable[[], AbstractContextManager[None]], *, once: bool
) -> Pair:
    """Seconds of STEPS steps under a witness, after one that is not timed; of one that bears a single forward, each
    under a new one."""
    if once:
        pairs = [_under(watched, lambda: _seconds(step)) for _ in range(STEPS)]
        return sum(clock for clock, _ in pairs), sum(cpu for _, cpu in pairs)

    def several() -> Pair:
        step()
        return _seconds(step, STEPS)

    return _under(watched, several)


def _under(watched: Callable[[], AbstractContextManager[None]], spent: Callable[[], Pair]) -> Pair:
    with watched():
        return spent()


def _seconds(step: Callable[[], None], times: int = 1) -> Pair:
    start = time.perf_counter(), time.thread_time()
    for _ in range(times):
        step()
    return time.perf_counter() - start[0], time.thread_time() - start[1]


def micro_batch(case: Case) -> Callable[[], None]:
    """Forward and backward of one micro-batch."""
    device = torch.device("cpu")
    rank = set_up(case, scheme_of(case.mode), Mesh.of(case), device)
    batch = rank.parts.local(deliver(case, rank.mesh, 0, 0, device))

    def step() -> None:
        for parameter in rank.parameters.values():
            parameter.grad = None
        rank.parts.loss(rank.model(batch), rank.strategy.laid_out(batch.labels)).sum().backward()

    return step


@contextmanager
def _watch_body(name: str, rank: int, case: Case) -> Iterator[None]:
    """The witness of this name around the body."""
    with ExitStack() as watching:
        if name == RECORDING:
            recorder = watching.enter_context(Recorder("", case.mode, 2, case.axes, ranges=attached_ranges()))
            watching.enter_context(observe_calls(recorder))
            watching.enter_context(recorder.on_rank(rank))
        elif name == ONCE:
            watching.enter_context(CommDebugMode())
        elif name == "torch profiler":
            watching.enter_context(profile(activities=[ProfilerActivity.CPU], record_shapes=True, with_stack=True))
        yield


def _main(folder: Path, rounds: int, witnesses: Sequence[str]) -> int:
    start = multiprocessing.get_context("spawn")
    ranks = [start.Process(target=_rank, args=(rank, folder, rounds, witnesses)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(LIMIT_S)
        if process.is_alive():
            process.kill()
    return 0 if all(process.exitcode == 0 for process in ranks) else 1


if __name__ == "__main__":
    sys.exit(_main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:] or WITNESSES))
