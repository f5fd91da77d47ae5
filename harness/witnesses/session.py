"""Profiling sessions: the cases of a run once more, in other processes, each session with one witness.

A session is a child process (harness.witnesses.measured), so that the tool watches all of it and nothing of the tool
stays here. Its results are read and reconciled: the recorder's ledger of that very run, and the witness's sightings.
"""

import os
import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from shardproof.harness.engines.processes.rank_program import RankResult
from shardproof.harness.errors import MachineError, RequestError, error_text
from shardproof.harness.protocols import CaseLike, case_text
from shardproof.harness.traces.nsys import read_own_ranges
from shardproof.harness.traces.nsys_export import database_of, run_to_end
from shardproof.harness.witnesses.agreement import Sighting, sighting_of
from shardproof.harness.witnesses.chosen import steps_text
from shardproof.harness.witnesses.measured import SessionRequest, WatchedRank
from shardproof.harness.witnesses.torch_trace import read_traces

LIMIT_S = 60.0
"""How long processes and tool may take to start, beside the time of the cases."""
_ENVIRONMENT = {
    "TORCH_FR_BUFFER_SIZE": "200000",  # torch's own log of calls must reach back over the whole measured run
    "KINETO_LOG_LEVEL": "5",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A case in one session: what its ranks measured and what the witness saw, or why there is nothing."""

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
    """Run the session, in a folder that it makes. Returns its results by the text of their case.

    Raises MachineError, in one sentence, if the tool is missing, broken, or lost what it saw.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(len(job.cases)):
        (folder / str(index)).mkdir(exist_ok=True)
    (folder / "job.pickle").write_bytes(pickle.dumps(job))
    program = [sys.executable, "-m", "shardproof.harness.witnesses.measured", str(folder)]
    limit_s = LIMIT_S * (1 + len({case.world_size for case in job.cases})) + job.timeout_s * len(job.cases)
    environment, in_database = {**os.environ, **_ENVIRONMENT}, None
    if job.tool == "nsys":
        database = database_of(program, folder, device=job.device, timeout_s=limit_s, environment=environment)
        in_database = read_database(database)
    else:
        _run_child(program, folder, limit_s, environment)
    return {
        text: _session(job, folder / str(index), case, None if in_database is None else in_database.get(text, ()))
        for index, case in enumerate(job.cases)
        for text in [case_text(case)]
    }


def read_database(path: Path) -> dict[str, list[Sighting]]:
    """The sightings of every case by its text. Raises MachineError for an inconsistent database."""
    try:
        cases = read_own_ranges(path)
    except RequestError as problem:
        raise MachineError(f"witness nsys: {problem}") from problem
    return {
        case: [
            sighting_of(call, trace.rank or 0, index, region=call.module or "")
            for trace in traces
            for index, call in enumerate(trace.calls)
        ]
        for case, traces in cases.items()
    }


def _session(job: SessionRequest, folder: Path, case: CaseLike, seen: Sequence[Sighting] | None) -> Session:
    lost, ranks = partial(Session, tool=job.tool, folder=folder), []
    for rank in range(case.world_size):
        left = folder / f"rank{rank}.pickle"
        if not left.exists():
            return lost(problem=f"rank {rank} left no result; its words are in {folder.parent}")
        end: RankResult = pickle.loads(left.read_bytes())
        left.unlink()
        if not isinstance(end.value, WatchedRank):
            why = error_text(end.error) if end.error else "its program left early"
            return lost(problem=f"rank {rank} failed: {why}")
        ranks.append(end.value)
    if problem := _explain_mismatch(job.steps, ranks):
        return lost(problem=problem)
    if seen is None:
        seen = read_traces(folder, case.world_size)
    return Session(tool=job.tool, folder=folder, ranks=tuple(ranks), seen=tuple(seen))


def _explain_mismatch(steps: range | None, ranks: Sequence[WatchedRank]) -> str:
    """Why the watched calls are not those that the ledger gives to the chosen steps, "" if they are."""
    for rank, measured in enumerate(ranks):
        mine = {event.call_index for event in measured.events if steps is None or event.step in steps}
        if mine != set(measured.calls):
            of = "the run" if steps is None else f"steps {steps_text(steps)}"
            return f"rank {rank} was watched for {len(measured.calls)} calls, and {of} made {len(mine)}, or others"
    return ""


def _run_child(program: Sequence[str], folder: Path, limit_s: float, environment: Mapping[str, str]) -> None:
    """Run the child to its end. Its output goes to a log, since it belongs to no table."""
    log = folder / "session.log"
    try:
        run_to_end(program, log, limit_s, environment)
    except subprocess.TimeoutExpired as problem:
        why = f"the session did not end within {limit_s:.0f} s; {log} has its words"
        raise MachineError(f"witness torch is missing: {why}") from problem
