"""Launched ranks, from their agents' messages alone: how an agent ends, and how a run ends for rank 0.

No process is started here: the agents of a run are played by the test. Agents with workers are in `test_torchrun`.
"""

import threading
import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import NoReturn

import pytest

from shardproof.harness.engines.processes.launched import torchrun
from shardproof.harness.engines.processes.launched.rendezvous import Launched
from shardproof.harness.engines.processes.launched.torchrun import (
    CALLS,
    END,
    KILL,
    LEAVE,
    RUN,
    START,
    WHERE,
    LaunchedWorkers,
    Progress,
    relay_orders,
)
from shardproof.harness.engines.processes.messages import RunOrder, Standing, WorkerReport, pack_report
from shardproof.harness.engines.processes.rank_program import RankResult
from shardproof.harness.engines.processes.supervisor import Supervisor
from shardproof.harness.engines.processes.workers import ProcessEnd, process_end
from shardproof.harness.errors import MachineError, RankCrashed, RankDied, RankRaised, RequestError, Stalled, TimeLimit

NUMBER = 7
GONE = RuntimeError("Connection closed by peer [10.0.0.2]:4711")


@pytest.mark.parametrize("ordered", [True, False])
def test_an_agent_tells_that_its_worker_cannot_be_forked_and_knows_whether_rank_0_ended_it(ordered: bool) -> None:
    def fork() -> NoReturn:
        raise MachineError("no memory", ranks=(), positions=())

    link, theirs = Pipe()
    place = Launched(rank=1, world_size=2, local_rank=1, master_addr="there", master_port=29500)
    for word in (CALLS, LEAVE, START) if ordered else ():  # before START there is nobody who could answer
        link.send((word, NUMBER))
    link.send((END, 0)) if ordered else link.close()
    assert relay_orders(theirs, fork, place) is ordered
    if ordered:
        assert link.recv() == (NUMBER, Progress(end=ProcessEnd("no memory")))


Message = tuple[int, Progress]


def answer(report: WorkerReport | None = None, number: int = NUMBER) -> Message:
    return number, Progress() if report is None else Progress(report=pack_report(report))


def ended(rank: int, value: object = None, error: BaseException | None = None, number: int = NUMBER) -> Message:
    detail = f"{type(error).__name__}: {error}" if error else ""
    result = RankResult(rank=rank, value=value, error=error, detail=detail)
    return answer(WorkerReport(number=number, result=result), number)


def died(code: int) -> Message:
    return NUMBER, Progress(end=process_end(code))


class World:
    """Ranks that have said everything beforehand: the answer to START, then these messages; None: it is gone."""

    def __init__(self, *messages: list[Message] | None) -> None:
        pipes = [Pipe() for _ in messages]
        self.links = {rank: ours for rank, (ours, _) in enumerate(pipes)}
        self.theirs: list[Connection] = [theirs for _, theirs in pipes]
        for theirs, says in zip(self.theirs, messages, strict=True):
            for message in (answer(), *(says or ())):
                theirs.send(message)
            if says is None:
                theirs.close()
        self.terminated = False

    def results(self, timeout_s: float = 5.0) -> list[object]:
        size = len(self.links)
        order = RunOrder(number=NUMBER, world_size=size, seed=0, program=b"", store_prefix="", connection=NUMBER)
        workers = LaunchedWorkers(order, self.links, lambda: self.terminated)
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


def broken(**words: str) -> Message:
    return answer(WorkerReport(number=NUMBER, **words))  # type: ignore[arg-type]


LOST = [ended(0, error=GONE)]
"""Rank 0 has lost a peer."""


@pytest.mark.parametrize(
    ("messages", "kind", "cause"),
    [
        ([LOST, [ended(1, error=KeyError("w1"))], [ended(2, error=GONE)]], RankRaised, "1 of 3 raised KeyError: 'w1'"),
        ([LOST, [died(-9)]], RankDied, "1 of 2 died: killed by SIGKILL, as the system does when memory runs out"),
        ([LOST, [died(-11)]], RankCrashed, "1 of 2 died: killed by SIGSEGV"),
        ([LOST, [died(3)]], RankCrashed, "1 of 2 died: its process ended with"),
        ([LOST, [died(-15)]], RankDied, "1 of 2 died: "),
        ([LOST, [died(70)]], RankDied, "1 of 2 died: "),
        ([[died(-6)], [died(-9)]], RankDied, ""),
        ([[ended(0)], None], RankDied, "1 of 2 died: its launched process is gone"),
    ],
)
def test_a_run_ends_in_its_first_cause(
    impatient: None, messages: list[list[Message] | None], kind: type[RankRaised | RankDied | RankCrashed], cause: str
) -> None:
    """An error of the program comes before one that a peer is gone, a death before what it does to others."""
    with pytest.raises(kind, match=f"^rank {cause}") as problem:
        World(*messages).results()
    if kind is RankRaised:
        assert isinstance(problem.value.__cause__, KeyError)
        assert problem.value.ranks == (1, 0, 2)


def test_a_world_that_cannot_run_says_why(impatient: None) -> None:
    world = World([], [ended(1)])
    world.terminated = True
    with pytest.raises(RankDied, match="^the launcher ends this world"):
        world.results()
    absent = "ModuleNotFoundError: no module named mine"
    with pytest.raises(RequestError, match=f"^program: cannot be read in the process of a rank: {absent}; legal: what"):
        World([broken(refused=absent)]).results()
    with pytest.raises(MachineError, match="^the ranks could not be connected: RuntimeError: no route"):
        World([ended(0)], [broken(broken="RuntimeError: no route")]).results()


def test_a_rank_that_stays_is_asked_and_all_are_ended(impatient: None) -> None:
    world = World([ended(0)], [])
    start_s = time.perf_counter()
    with pytest.raises(Stalled, match=r"no end within 0.2 s: rank 1 runs; .*, and rank 0 has ended") as problem:
        world.results(timeout_s=0.2)
    assert time.perf_counter() - start_s < 2
    assert problem.value.ranks == (1,)
    assert world.told(0)[-1] == world.told(1)[-1] == KILL


def test_a_stopped_rank_that_goes_on_to_its_end_when_it_is_asked_is_told_as_stopped(impatient: None) -> None:
    world = World([], [])  # rank 0 says nothing, so that all is heard that comes within the time for an answer

    def goes_on() -> None:
        while world.theirs[1].recv()[0] != WHERE:
            pass
        world.theirs[1].send((NUMBER, Progress(standing=Standing(stopped=True, caller="a.py:3"))))
        world.theirs[1].send(ended(1))

    thread = threading.Thread(target=goes_on)
    thread.start()
    with pytest.raises(TimeLimit) as problem:
        world.results(timeout_s=0.2)
    thread.join()
    assert [position.state for position in problem.value.positions] == ["runs", "is stopped"]
