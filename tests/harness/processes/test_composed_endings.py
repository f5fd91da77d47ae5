"""A rank of a composed case that ends badly: it is named with its place, and what the others waited for."""

import re
import time
from pathlib import Path

import pytest

from shardproof.harness.engines.processes.forked.pool import PoolEngine
from shardproof.harness.engines.processes.supervisor import Supervisor
from shardproof.harness.engines.processes.trace_matcher import MatchedCall
from shardproof.harness.errors import ProgramError, RankCrashed, RankDied, RankRaised, ShardproofError, Stalled
from shardproof.harness.running.ranks.execution import execute
from shardproof.harness.subject import case_of, resolve_subject
from tests.harness.engines.programs import calls_then
from tests.harness.processes.test_torchrun import torchrun

STAGES = "pp=2 cp=2 tp=1 zero=1 micro=2"
EXPERTS = "ep=2 dp=2 tp=1 experts=2"
LIMIT_S = 8
"""Time limit of the ranks that never end. In it the processes of a pool import the modules of the subject too."""
HERE = r"\S*tests/harness/processes/composed\.py:\d+ in end"
WAITS = {
    STAGES: {0: "send #5 of pp (0 2)", 1: "send #5 of pp (1 3)", 2: "send #18 of cp (2 3)"},
    EXPERTS: {0: "all_gather #2 of etp_ep (0 1)"},
}
"""Where the other ranks are when the last one ends behind its thirtieth call of a module, by case and rank."""
ENDINGS: dict[str, tuple[type[ShardproofError], str]] = {
    "killed": (RankDied, r"rank {last} of {size} died: killed by SIGKILL.*"),
    "exits": (RankCrashed, r"rank {last} of {size} died: its process ended with exit status 0"),
    "raises": (RankRaised, rf"rank {{last}} of {{size}} raised ValueError: bad layer, at {HERE}"),
    "stopped": (Stalled, rf"no end within {LIMIT_S} s: rank {{last}} is stopped at {HERE}; .*"),
    "sleeps": (Stalled, rf"no end within {LIMIT_S} s: rank {{last}} runs at {HERE}; .*"),
    "loops": (Stalled, rf"no end within {LIMIT_S} s: rank {{last}} runs at {HERE}; .*"),
}
QUICK = {("stopped", STAGES), ("exits", EXPERTS)}


def _ways() -> list[object]:
    ways = [(kind, case) for kind in ENDINGS for case in WAITS]
    deep = pytest.mark.deep("four CPU seconds each")
    return [pytest.param(*way, marks=[] if way in QUICK else [deep]) for way in ways]


@pytest.mark.parametrize(("kind", "case"), _ways())
def test_the_rank_its_place_and_what_the_others_waited_for_are_named(pool: PoolEngine, kind: str, case: str) -> None:
    subject = resolve_subject(f"tests.harness.processes.composed:{kind}")
    read, (error, cause) = case_of(case, subject), ENDINGS[kind]
    last = read.world_size - 1
    with pytest.raises(error) as problem:
        execute(read, subject.call, pool, name=subject.address, timeout_s=LIMIT_S)
    found = problem.value
    assert isinstance(found, RankDied | ProgramError)
    assert found.exit_status == (3 if kind == "killed" else 1)
    assert re.fullmatch(cause.format(last=last, size=read.world_size), found.cause), found.cause
    assert last in found.ranks
    *others, ended = found.positions
    assert {other.rank: other.call for other in others if other.state == "waits in"} == WAITS[case], found
    assert ended.caller, "the line where it ended, or its last call"


@pytest.mark.deep("five seconds by the clock")
def test_a_rank_that_stops_late_is_a_failure_of_the_program_too(
    pool: PoolEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = Supervisor._find_waiting_calls

    def as_if_calls_just_came(self: Supervisor) -> list[MatchedCall | None]:
        self._quiet = self._matcher.count, time.monotonic()
        return waiting(self)

    monkeypatch.setattr(Supervisor, "_find_waiting_calls", as_if_calls_just_came)
    with pytest.raises(Stalled, match="rank 1 is stopped") as problem:
        pool.run(calls_then, "stop", world_size=2, timeout_s=5.0)
    assert problem.value.exit_status == 1


@pytest.mark.deep("15 CPU seconds each: four processes that a launcher starts")
@pytest.mark.parametrize("kind", ENDINGS)
def test_the_same_is_named_under_torchrun(tmp_path: Path, kind: str) -> None:
    words = ["run", STAGES, "--subject", f"tests.harness.processes.composed:{kind}", "--engine", "torchrun"]
    _status, out, err = torchrun(tmp_path, 4, "-m", "shardproof", *words, "--timeout", str(LIMIT_S), "--when", "0")
    what = next((line for line in out.splitlines() if line.startswith("what:")), out + err)
    assert re.search(ENDINGS[kind][1].format(last=3, size=4), what), what
    first = next(line for line in out.splitlines() if line.startswith("first:"))
    for rank, call in WAITS[STAGES].items():
        assert f"rank {rank}: waits in {call}" in first, first
