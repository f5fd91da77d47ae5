"""Profiling sessions: the cases of a run once more, on processes of their own, each time with one witness switched on.

A session is a child process (harness.witnesses.child), so that the tool is around all of it and nothing of the tool
stays here. What it leaves is read and reconciled: the recorder's ledger of that very run, and the witness's sightings.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.engines.processes.rank_program import RankResult
from harness.errors import MachineError, error_text
from harness.protocols import CaseLike, case_text
from harness.witnesses.chosen import steps_text
from harness.witnesses.database import read_database
from harness.witnesses.measured import WatchedRank
from harness.witnesses.nsys import database_of
from harness.witnesses.sighting import Sighting
from harness.witnesses.torch_trace import read_traces

LIMIT_S = 60.0
"""Start of the processes and of the tool, beside the time of the cases."""
_ENVIRONMENT = {
    "TORCH_FR_BUFFER_SIZE": "200000",  # torch's own log of calls must reach back over the whole measured run
    "KINETO_LOG_LEVEL": "5",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRequest:
    """What a session runs: the subject by name, the cases, one tool, how often each runs before and unwatched, and
    the steps that are watched and timed, None for whole runs."""

    subject: str
    cases: tuple[CaseLike, ...]
    tool: str
    device: str = "cpu"
    warmup: int = 1
    repeats: int = 3
    timeout_s: float = 60.0
    steps: range | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One case in one session: what its ranks measured and what the witness saw, or why there is nothing."""

    tool: str
    folder: Path
    ranks: tuple[WatchedRank, ...] = ()
    seen: tuple[Sighting, ...] = ()
    problem: str = ""

    @property
    def disturbed(self) -> tuple[int, ...]:
        """Ranks whose outcome differs in a bit when it is watched."""
        return tuple(rank for rank, measured in enumerate(self.ranks) if measured.plain != measured.watched)


def hold(job: SessionRequest, folder: Path) -> dict[str, Session]:
    """Hold the session, in a folder that it makes; sessions by the text of their case.

    Raises MachineError, in one sentence, when the tool is missing, broken, or lost what it saw.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(len(job.cases)):
        (folder / str(index)).mkdir(exist_ok=True)
    (folder / "job.pickle").write_bytes(pickle.dumps(job))
    texts = [case_text(case) for case in job.cases]
    program = [sys.executable, "-m", "shardproof.child", "harness.witnesses.child", str(folder)]
    worlds = len({case.world_size for case in job.cases})
    limit_s = LIMIT_S * (1 + worlds) + job.timeout_s * len(job.cases)
    if job.tool == "nsys":
        database = database_of(program, folder, device=job.device, timeout_s=limit_s, environment=_environment())
        in_database = read_database(database)
        return {
            text: _session(job, folder / str(index), case, in_database.get(text, ()))
            for index, (text, case) in enumerate(zip(texts, job.cases, strict=True))
        }
    _run(program, folder, limit_s)
    return {
        text: _session(job, folder / str(index), case, None)
        for index, (text, case) in enumerate(zip(texts, job.cases, strict=True))
    }


def _environment() -> Mapping[str, str]:
    return {**os.environ, **_ENVIRONMENT}


def _session(job: SessionRequest, folder: Path, case: CaseLike, seen: Sequence[Sighting] | None) -> Session:
    ranks = []
    for rank in range(case.world_size):
        left = folder / f"rank{rank}.pickle"
        if not left.exists():
            return Session(
                tool=job.tool, folder=folder, problem=f"rank {rank} left no result; its words are in {folder.parent}"
            )
        end: RankResult = pickle.loads(left.read_bytes())
        left.unlink()
        if not isinstance(end.value, WatchedRank):
            why = error_text(end.error) if end.error else "its program left early"
            return Session(tool=job.tool, folder=folder, problem=f"rank {rank} failed: {why}")
        ranks.append(end.value)
    if problem := _parted(job.steps, ranks):
        return Session(tool=job.tool, folder=folder, problem=problem)
    if seen is None:
        seen = read_traces(folder, case.world_size)
    return Session(tool=job.tool, folder=folder, ranks=tuple(ranks), seen=tuple(seen))


def _parted(steps: range | None, ranks: Sequence[WatchedRank]) -> str:
    """Why what was watched is not what the ledger gives to the chosen steps, "" when it is."""
    for rank, measured in enumerate(ranks):
        mine = {event.call_index for event in measured.events if steps is None or event.step in steps}
        if mine != set(measured.calls):
            of = "the run" if steps is None else f"steps {steps_text(steps)}"
            return f"rank {rank} was watched for {len(measured.calls)} calls, and {of} made {len(mine)}, or others"
    return ""


def _run(program: Sequence[str], folder: Path, limit_s: float) -> None:
    """Run the child to its end; what it prints goes to a log, since it belongs to no table."""
    with (folder / "session.log").open("ab") as log:
        child = subprocess.Popen(
            program,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            env=dict(_environment()),
            start_new_session=True,
        )
    try:
        child.wait(limit_s)
    except subprocess.TimeoutExpired as problem:
        why = f"the session did not end within {limit_s:.0f} s; {folder / 'session.log'} has its words"
        raise MachineError(f"witness torch is missing: {why}", ranks=(), positions=()) from problem
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
