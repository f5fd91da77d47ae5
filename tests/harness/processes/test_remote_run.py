"""How a run on launched workers ends, from their answers alone: no process is started here."""

from __future__ import annotations

import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import pytest

from harness.engines.processes.launched import workers as launched_workers
from harness.engines.processes.launched.agent import ANSWERED, DIED, KILL, LEAVE, RUN, START
from harness.engines.processes.launched.link import NUMBER_BYTES, Progress
from harness.engines.processes.launched.workers import LaunchedWorkers
from harness.engines.processes.messages import RunOrder, WorkerReport, packed, packed_report
from harness.engines.processes.rank_program import RankResult
from harness.engines.processes.supervisor import Supervisor
from harness.errors import MachineError, RankCrashed, RankDied, RankRaised, RequestError, TimeLimit

NUMBER = 7
GONE = RuntimeError("Connection closed by peer [10.0.0.2]:4711")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_GRACE_S", "_ANSWER_S"):
        monkeypatch.setattr(launched_workers, name, 0.05)
    for name in ("look_s", "settle_s"):
        monkeypatch.setattr(LaunchedWorkers, name, 0.05)


def answer(report: WorkerReport | None = None, number: int = NUMBER) -> bytes:
    progress = Progress() if report is None else Progress(report=packed_report(report))
    return ANSWERED + number.to_bytes(NUMBER_BYTES, "big") + packed(progress)


def ended(rank: int, value: object = None, error: BaseException | None = None, number: int = NUMBER) -> bytes:
    detail = f"{type(error).__name__}: {error}" if error else ""
    result = RankResult(rank=rank, value=value, error=error, detail=detail)
    return answer(WorkerReport(number=number, result=result), number)


class World:
    """Ranks that have said everything beforehand: a START answer, and then these messages."""

    def __init__(self, *messages: list[bytes]) -> None:
        pipes = [Pipe() for _ in messages]
        self.links = {rank: ours for rank, (ours, _) in enumerate(pipes)}
        self.theirs: list[Connection] = [theirs for _, theirs in pipes]
        for theirs, says in zip(self.theirs, messages, strict=True):
            for message in (answer(), *says):
                theirs.send_bytes(message)
        self.terminated = False

    def results(self, timeout_s: float = 5.0) -> list[object]:
        """What the run comes to."""
        order = RunOrder(
            number=NUMBER,
            rank=0,
            world_size=len(self.links),
            seed=0,
            timeout_s=timeout_s,
            program=b"",
            store_prefix="",
        )
        return Supervisor(LaunchedWorkers(order, self.links, lambda: self.terminated), timeout_s).results()

    def told(self, rank: int) -> list[bytes]:
        """The kinds of orders that the rank was given."""
        kinds = []
        while self.theirs[rank].poll(0):
            kinds.append(self.theirs[rank].recv_bytes()[:1])
        return kinds


def test_values_come_by_rank_whoever_is_first() -> None:
    world = World([ended(0, "a")], [ended(1, "b")])
    assert world.results() == ["a", "b"]
    assert world.told(0) == world.told(1) == [START, RUN, LEAVE]


def test_what_comes_late_from_another_run_is_not_heard() -> None:
    late = ended(0, "stale", number=NUMBER - 1)
    assert World([late, ended(0, "fresh")]).results() == ["fresh"]


def test_an_error_of_the_program_is_told_before_one_that_a_peer_is_gone() -> None:
    world = World([ended(0, error=GONE)], [ended(1, error=KeyError("w1"))], [ended(2, error=GONE)])
    with pytest.raises(RankRaised) as problem:
        world.results()
    assert problem.value.cause == "rank 1 of 3 raised KeyError: 'w1'"
    assert problem.value.ranks == (1, 0, 2)
    assert isinstance(problem.value.__cause__, KeyError)


def test_a_death_is_told_before_what_it_does_to_others() -> None:
    world = World([ended(0, error=GONE)], [DIED + b"-9"])
    with pytest.raises(RankDied) as problem:
        world.results()
    assert problem.value.cause.startswith("rank 1 of 2 died: killed by SIGKILL, as the system does")
    assert [position.state for position in problem.value.positions] == ["raised", "died"]


def test_a_rank_that_ends_itself_is_the_programs_doing() -> None:
    for code, kind in ((b"-11", RankCrashed), (b"3", RankCrashed), (b"-15", RankDied), (b"70", RankDied)):
        with pytest.raises(kind, match="rank 1 of 2 died: "):
            World([ended(0, error=GONE)], [DIED + code]).results()
    with pytest.raises(RankDied):
        World([DIED + b"-6"], [DIED + b"-9"]).results()


def test_a_connection_that_ends_is_a_launched_process_that_is_gone() -> None:
    world = World([ended(0)], [])
    world.theirs[1].close()
    with pytest.raises(RankDied, match="rank 1 of 2 died: its launched process is gone"):
        world.results()


def test_a_rank_that_stays_is_asked_and_then_ended() -> None:
    world = World([ended(0)], [])
    start_s = time.perf_counter()
    with pytest.raises(TimeLimit, match=r"no end within 0.2 s: rank 1 runs") as problem:
        world.results(timeout_s=0.2)
    assert time.perf_counter() - start_s < 2
    assert problem.value.ranks == (1,)
    assert world.told(1)[-2:] == [LEAVE, KILL]
    assert KILL not in world.told(0)


def test_a_launcher_that_ends_the_world_is_told() -> None:
    world = World([], [ended(1)])
    world.terminated = True
    with pytest.raises(RankDied, match="the launcher ends this world"):
        world.results()


def test_a_program_that_a_rank_cannot_read_is_a_wrong_request() -> None:
    with pytest.raises(RequestError, match="ModuleNotFoundError: .*legal: what a module defines that ranks can import"):
        World([answer(WorkerReport(number=NUMBER, refused="ModuleNotFoundError: no module named mine"))]).results()


def test_a_world_that_cannot_be_connected_is_a_failure_of_the_machine() -> None:
    with pytest.raises(MachineError, match="the ranks could not be connected: RuntimeError: no route"):
        World([ended(0)], [answer(WorkerReport(number=NUMBER, broken="RuntimeError: no route"))]).results()
