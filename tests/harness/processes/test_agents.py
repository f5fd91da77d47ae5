"""Launched ranks, from their agents' messages alone: what an agent does for its rank, and how a run ends for rank 0.

No process is started here: the worker of an agent, or the agents of a run, are played by the test.
"""

import threading
import time
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import pytest

from harness.engines.processes.exit_status import ProcessEnd, process_end
from harness.engines.processes.flight_recorder import ReadCalls
from harness.engines.processes.launched import torchrun
from harness.engines.processes.launched.agent import CALLS, END, KILL, LEAVE, RUN, START, WHERE, Progress, relay
from harness.engines.processes.launched.rendezvous import Launched
from harness.engines.processes.launched.torchrun import LaunchedWorkers
from harness.engines.processes.messages import RunOrder, WorkerReport, packed_report, unpacked
from harness.engines.processes.rank_program import RankResult
from harness.engines.processes.supervisor import Supervisor
from harness.errors import MachineError, RankCrashed, RankDied, RankRaised, RequestError, TimeLimit

PLACE = Launched(rank=1, world_size=2, local_rank=1, master_addr="there", master_port=29500)
NUMBER = 7
LIMIT_S = 60.0
GONE = RuntimeError("Connection closed by peer [10.0.0.2]:4711")


def order(world_size: int = 2) -> RunOrder:
    return RunOrder(number=NUMBER, world_size=world_size, seed=0, program=b"", store_prefix="", connection=NUMBER)


class PlayedWorker:
    """A worker of an agent, and its server; a flight recorder of one call."""

    def __init__(self) -> None:
        self.pipe, self.theirs = Pipe()
        self.server = self.recording = self
        self.killed = 0

    def begin(self, run: int) -> None:
        self.run = run

    def read(self) -> ReadCalls:
        return ReadCalls(((0.0, f"call of run {self.run}"),), True)  # type: ignore[arg-type]

    def send(self, message: bytes) -> None:
        self.pipe.send_bytes(message)

    def end(self) -> ProcessEnd:
        return process_end(7)

    def kill(self, workers: list[Any]) -> None:
        self.killed += 1

    def close(self) -> None:
        self.pipe.close()


class Relayed:
    """An agent in a thread, rank 0's end of its connection, and the workers that it forks."""

    def __init__(self) -> None:
        self.link, theirs = Pipe()
        self.workers: list[PlayedWorker] = []
        self.ended: list[bool] = []
        self.thread = threading.Thread(target=lambda: self.ended.append(relay(theirs, self._fork, PLACE)), daemon=True)
        self.thread.start()

    def _fork(self) -> Any:
        self.workers.append(PlayedWorker())
        return self.workers[-1]

    def hears(self) -> tuple[int, Progress]:
        """Next message to rank 0."""
        assert self.link.poll(LIMIT_S)
        number, progress = self.link.recv()
        return number, progress

    def ends(self) -> bool:
        """Wait for the end; whether it was an ordered one."""
        self.thread.join(LIMIT_S)
        return self.ended[0]


@pytest.mark.parametrize("told", [True, False])
def test_an_agent_ends_with_rank_0_and_knows_whether_it_was_told(told: bool) -> None:
    relayed = Relayed()
    relayed.link.send((START, 1))
    relayed.hears()
    relayed.link.send((END, 0)) if told else relayed.link.close()
    assert relayed.ends() is told
    assert relayed.workers[0].killed == 1


def test_orders_and_reports_pass_with_the_calls_and_a_dead_worker_is_told_and_replaced() -> None:
    relayed = Relayed()
    for word in (CALLS, LEAVE):  # there is no worker yet, and nobody who could answer
        relayed.link.send((word, 1))
    relayed.link.send((START, NUMBER))
    assert relayed.link.poll(LIMIT_S)
    seen = Progress(calls=relayed.workers[0].read())
    assert relayed.hears() == (NUMBER, seen)
    (worker,) = relayed.workers
    relayed.link.send((RUN, order()))
    told = unpacked(worker.theirs.recv_bytes())
    assert (told.number, told.store, told.local_rank) == (NUMBER, ("there", 29500), 1)
    worker.theirs.send_bytes(b"report")
    assert relayed.hears() == (NUMBER, seen._replace(report=b"report"))
    relayed.link.send((LEAVE, NUMBER))
    assert unpacked(worker.theirs.recv_bytes()) is None
    worker.theirs.close()
    assert relayed.hears() == (NUMBER, seen._replace(end=process_end(7)))
    relayed.link.send((START, NUMBER + 1))
    assert relayed.hears()[0] == NUMBER + 1 and len(relayed.workers) == 2
    relayed.link.send((KILL, NUMBER + 1))
    relayed.link.send((END, 0))
    assert relayed.ends() and relayed.workers[1].killed == 1
    with pytest.raises(EOFError):
        relayed.link.recv()  # a worker that was ended on demand is no news


def test_a_worker_that_cannot_be_forked_is_told_as_the_end_of_its_rank() -> None:
    def fork() -> Any:
        raise MachineError("no memory", ranks=(), positions=())

    link, theirs = Pipe()
    thread = threading.Thread(target=relay, args=(theirs, fork, PLACE), daemon=True)
    thread.start()
    link.send((START, NUMBER))
    assert link.poll(LIMIT_S) and link.recv() == (NUMBER, Progress(end=ProcessEnd("no memory")))
    link.close()
    thread.join(LIMIT_S)


Message = tuple[int, Progress]


def answer(report: WorkerReport | None = None, number: int = NUMBER) -> Message:
    return number, Progress() if report is None else Progress(report=packed_report(report))


def ended(rank: int, value: object = None, error: BaseException | None = None, number: int = NUMBER) -> Message:
    detail = f"{type(error).__name__}: {error}" if error else ""
    result = RankResult(rank=rank, value=value, error=error, detail=detail)
    return answer(WorkerReport(number=number, result=result), number)


def died(code: int) -> Message:
    return NUMBER, Progress(end=process_end(code))


class World:
    """Ranks that have said everything beforehand: the answer to START, and then these messages."""

    def __init__(self, *messages: list[Message]) -> None:
        pipes = [Pipe() for _ in messages]
        self.links = {rank: ours for rank, (ours, _) in enumerate(pipes)}
        self.theirs: list[Connection] = [theirs for _, theirs in pipes]
        for theirs, says in zip(self.theirs, messages, strict=True):
            for message in (answer(), *says):
                theirs.send(message)
        self.terminated = False

    def results(self, timeout_s: float = 5.0) -> list[object]:
        """Results of the run."""
        workers = LaunchedWorkers(order(len(self.links)), self.links, lambda: self.terminated)
        return Supervisor(workers, timeout_s).results()

    def told(self, rank: int) -> list[str]:
        """The words of the orders that the rank was given, but for questions."""
        words = []
        while self.theirs[rank].poll(0):
            words.append(self.theirs[rank].recv()[0])
        return [word for word in words if word not in {CALLS, WHERE}]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchrun, "_ANSWER_S", 0.05)
    for name in ("look_s", "settle_s"):
        monkeypatch.setattr(LaunchedWorkers, name, 0.05)


def test_values_come_by_rank_whoever_is_first_and_nothing_late_from_another_run(impatient: None) -> None:
    world = World([ended(0, "stale", number=NUMBER - 1), ended(0, "a")], [ended(1, "b")])
    assert world.results() == ["a", "b"]
    assert world.told(0) == world.told(1) == [START, RUN, LEAVE]


def gone() -> World:
    world = World([ended(0)], [])
    world.theirs[1].close()
    return world


def terminated() -> World:
    world = World([], [ended(1)])
    world.terminated = True
    return world


def broken(**words: str) -> Message:
    return answer(WorkerReport(number=NUMBER, **words))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("world", "kind", "cause"),
    [
        (
            lambda: World([ended(0, error=GONE)], [ended(1, error=KeyError("w1"))], [ended(2, error=GONE)]),
            RankRaised,
            "rank 1 of 3 raised KeyError: 'w1'",
        ),
        (
            lambda: World([ended(0, error=GONE)], [died(-9)]),
            RankDied,
            "rank 1 of 2 died: killed by SIGKILL, as the system does when memory runs out",
        ),
        (lambda: World([ended(0, error=GONE)], [died(-11)]), RankCrashed, "rank 1 of 2 died: killed by SIGSEGV"),
        (lambda: World([ended(0, error=GONE)], [died(3)]), RankCrashed, "rank 1 of 2 died: its process ended with"),
        (lambda: World([ended(0, error=GONE)], [died(-15)]), RankDied, "rank 1 of 2 died: "),
        (lambda: World([ended(0, error=GONE)], [died(70)]), RankDied, "rank 1 of 2 died: "),
        (lambda: World([died(-6)], [died(-9)]), RankDied, "rank "),
        (gone, RankDied, "rank 1 of 2 died: its launched process is gone"),
        (terminated, RankDied, "the launcher ends this world"),
        (
            lambda: World([broken(refused="ModuleNotFoundError: no module named mine")]),
            RequestError,
            "program: cannot be read in the process of a rank: ModuleNotFoundError: no module named mine; legal: what",
        ),
        (
            lambda: World([ended(0)], [broken(broken="RuntimeError: no route")]),
            MachineError,
            "the ranks could not be connected: RuntimeError: no route",
        ),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_run_ends_in_its_first_cause(
    impatient: None, world: Callable[[], World], kind: type[Exception], cause: str
) -> None:
    """An error of the program comes before one that a peer is gone, a death before what it does to others."""
    with pytest.raises(kind) as problem:
        world().results()
    assert str(problem.value).startswith(cause)
    if "raised" in cause:
        assert isinstance(problem.value.__cause__, KeyError)
        assert problem.value.ranks == (1, 0, 2)  # type: ignore[attr-defined]


def test_a_rank_that_stays_is_asked_and_all_are_ended(impatient: None) -> None:
    world = World([ended(0)], [])
    start_s = time.perf_counter()
    with pytest.raises(TimeLimit, match=r"no end within 0.2 s: rank 1 runs") as problem:
        world.results(timeout_s=0.2)
    assert time.perf_counter() - start_s < 2
    assert problem.value.ranks == (1,)
    assert world.told(0)[-1] == world.told(1)[-1] == KILL
