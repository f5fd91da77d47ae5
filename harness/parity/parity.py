"""Parity of two launches as a run folder: recorded here by their commands, or read from folders of recordings."""

import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from shardproof.harness.parity.comparison import NAME
from shardproof.harness.parity.judging import Further, judge_launches
from shardproof.harness.parity.launching import LaunchRecorder
from shardproof.harness.parity.recorded import Launch, read_launch
from shardproof.harness.programs.session import ValueOptions
from shardproof.harness.programs.threads.launches import launches_of_threads
from shardproof.harness.programs.threads.torchrun_words import read_torchrun
from shardproof.harness.running.result import CaseResult, stored_part
from shardproof.harness.running.run_result import RunResult
from shardproof.harness.running.store import Store, environment
from shardproof.harness.verdicts.verdict import PASS


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityRequest:
    """Two commands to launch, and how. `inproc`: ranks of torchrun are threads of one process. `values` are the options
    of recording, `command` is the user's command.
    """

    first: tuple[str, ...]
    second: tuple[str, ...]
    steps: int
    timeout_s: float
    out: Path
    same_init: bool
    inproc: bool
    values: ValueOptions
    command: tuple[str, ...]


def prove_parity(request: ParityRequest, heard: Callable[[str], object] = str) -> RunResult:
    """Record both launches and, if needed, further runs of the first one; judge them.

    Raises what a launch raises that does not finish its last step, and RequestError if ranks are to be threads and the
    command does not allow it.
    """
    for command in (request.first, request.second) if request.inproc else ():
        read_torchrun(command)
    about: dict[str, object] = {"subject": NAME, "engine": "launches", "first": request.first, "second": request.second}
    about |= {"timeout_s": request.timeout_s, "steps": request.steps, "cases": 1}
    store = Store(request.out, NAME, environment(request.command, about))
    seconds: dict[str, float] = {}
    with launches_of_threads(request.inproc) as threads:
        recorder = LaunchRecorder(
            folder=store.path,
            steps=request.steps,
            timeout_s=request.timeout_s,
            values=request.values,
            heard=heard,
            threads=threads,
        )
        result = _judge_recorded(request, recorder, seconds)
    # These are as large as the first launch, and no longer needed.
    for folder in (store.path / "again", *store.path.glob("perturbed-*")):
        shutil.rmtree(folder / "values", ignore_errors=True)
    return _store_result(replace(result, seconds=seconds), store)


def _judge_recorded(request: ParityRequest, recorder: LaunchRecorder, seconds: dict[str, float]) -> CaseResult:
    """Record both launches and judge them; `seconds` are filled in by part."""
    with _time_part(seconds, "truth"):
        first = recorder.record("first", request.first)
    start = str(first.folder.resolve()) if request.same_init else ""
    with _time_part(seconds, "recorded"):
        second = recorder.record_same_init("second", request.second, start)

    def again() -> Launch:
        with _time_part(seconds, "again"):
            return recorder.record("again", request.first, same_init=start)

    def perturb(seed: int) -> Launch:
        with _time_part(seconds, "control"):
            return recorder.record(f"perturbed-{seed}", request.first, perturb=seed, same_init=start)

    with _time_part(seconds, "checks"):
        further = Further(again=again, perturbed=perturb)
        result = judge_launches(first, second, repeat=shlex.join(request.command), further=further)
    seconds["checks"] -= seconds.get("again", 0.0) + seconds.get("control", 0.0)
    return result


def compare_recordings(
    first: Path, second: Path, controls: Sequence[Path], out: Path, command: Sequence[str]
) -> RunResult:
    """Judge two folders of recordings; `controls` are recordings of the first launch with its rounding moved."""
    launches = [read_launch(folder) for folder in (first, second, *controls)]
    about = {"subject": NAME, "engine": "recordings", "first": [str(first)], "second": [str(second)], "cases": 1}
    store = Store(out, NAME, environment(command, about))
    started = time.perf_counter()
    given = dict(enumerate(launches[2:], 1))
    result = judge_launches(launches[0], launches[1], repeat=shlex.join(command), further=Further(perturbed=given.get))
    return _store_result(replace(result, seconds={"checks": time.perf_counter() - started}), store)


def _store_result(result: CaseResult, store: Store) -> RunResult:
    """The result in its run folder."""
    case = result.case
    store.plan([{"case": result.text, "mode": case.mode, "world_size": case.world_size}])
    stored = stored_part(result)
    for file, columns, rows in stored.tables:
        store.extend(file, columns, rows)
    store.add(stored.text, stored.ledger, stored.rows, stored.verdicts, stored.seconds)
    store.close()
    status = 0 if result.verdict == PASS else 1
    return RunResult(path=store.path, verdicts=result.verdicts, exit_status=status, notes=tuple(store.notes))


@contextmanager
def _time_part(seconds: dict[str, float], part: str) -> Iterator[None]:
    started = time.perf_counter()
    try:
        yield
    finally:
        seconds[part] = seconds.get(part, 0.0) + time.perf_counter() - started
