"""Launched processes: how they find each other, how an agent ends, and how a run ends for rank 0.

torchrun's words hold, SLURM's where they are missing. On the channel every rank joins by its number, strangers do not,
and every wait is bounded. The agents of a run are played by the test: agents with workers are in `test_torchrun`.
"""

import functools
import re
import socket
import threading
import time
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import NoReturn

import pytest
from torch._C._distributed_c10d import HashStore

from shardproof.harness.engines.processes.launched import torchrun
from shardproof.harness.engines.processes.launched.rendezvous import (
    TORCHRUN_LINE,
    Launched,
    gather_connections,
    join_driver,
    launched_world,
)
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
from shardproof.harness.engines.processes.rank_program import RankResult, RunOrder, Standing, WorkerReport, pack_report
from shardproof.harness.engines.processes.supervisor import Supervisor
from shardproof.harness.engines.processes.workers import ProcessEnd, process_end
from shardproof.harness.errors import MachineError, RankCrashed, RankDied, RankRaised, RequestError, Stalled, TimeLimit

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29500"}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_NODELIST": "gpu[07-09,12],login1",
    "SLURM_JOB_ID": "123456",
}


def test_torchrun_says_where_a_process_stands() -> None:
    place = launched_world(TORCHRUN)
    assert place == Launched(rank=3, world_size=4, local_rank=1, master_addr="10.0.0.7", master_port=29500)
    assert not place.drives
    assert launched_world({**TORCHRUN, "RANK": "0"}).drives


def test_slurm_stands_for_what_torchrun_did_not_say() -> None:
    place = launched_world(SLURM)
    assert (place.rank, place.world_size, place.local_rank, place.master_addr) == (5, 8, 1, "gpu07")
    assert 1024 < place.master_port < 32768, "no port that the system hands out by itself"
    assert place.master_port == launched_world({**SLURM, "SLURM_PROCID": "0"}).master_port
    assert place.master_port != launched_world({**SLURM, "SLURM_JOB_ID": "123457"}).master_port
    given = launched_world({**SLURM, "MASTER_ADDR": "there", "MASTER_PORT": "29501"})
    assert (given.master_addr, given.master_port) == ("there", 29501)
    assert launched_world({**SLURM, **TORCHRUN}).rank == 3, "torchrun, which SLURM has started"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("one", "one"), ("a,b", "a"), ("n[3]", "n3"), ("n[03-05]", "n03"), ("r1n[2,4]-ib,x", "r1n2-ib"), ("a-1,b", "a-1")],
)
def test_the_first_node_of_a_list(nodes: str, first: str) -> None:
    assert launched_world({**SLURM, "SLURM_JOB_NODELIST": nodes}).master_addr == first


@pytest.mark.parametrize("missing", [*TORCHRUN, *SLURM])
def test_a_word_that_is_missing_is_named_beside_a_line_that_sets_it(missing: str) -> None:
    words = TORCHRUN if missing in TORCHRUN else SLURM
    rest = {name: value for name, value in words.items() if name != missing}
    with pytest.raises(RequestError) as problem:
        launched_world(rest)
    assert str(problem.value).startswith(f"engine=torchrun: {missing} is not set")
    assert str(problem.value).endswith(f"legal: {TORCHRUN_LINE}")


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("RANK", "4", "whole number from 0 to 3; legal:"),
        ("WORLD_SIZE", "0", "whole number from 1; legal:"),
        ("LOCAL_RANK", "1.5", "whole number from 0; legal:"),
        ("MASTER_PORT", "65536", "whole number from 1 to 65535; legal:"),
        ("SLURM_JOB_NODELIST", "[1]", "list of hosts"),
    ],
)
def test_a_word_that_cannot_be_is_refused_with_its_rule(name: str, value: str, rule: str) -> None:
    with pytest.raises(RequestError, match=rf"engine=torchrun: {name}={re.escape(value)} must be a {rule}"):
        launched_world({**(TORCHRUN if name in TORCHRUN else SLURM), name: value})


def test_a_place_where_nobody_waits_is_a_failure_of_the_machine() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound and not listening: nobody answers there
        port = held.getsockname()[1]
        alone = Launched(rank=1, world_size=2, local_rank=1, master_addr="127.0.0.1", master_port=port)
        with pytest.raises(MachineError, match=rf"rank 1 of 2 cannot meet the others at tcp://127.0.0.1:{port}"):
            alone.store(0.5)


def place(rank: int, world_size: int = 3) -> Launched:
    return Launched(rank=rank, world_size=world_size, local_rank=rank, master_addr="127.0.0.1", master_port=29500)


def beside(call: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def test_every_rank_is_reached_by_its_number() -> None:
    store = HashStore()
    ours: dict[int, Connection] = {}
    thread = beside(lambda: ours.update(gather_connections(place(0), store, 5)))
    theirs = {rank: join_driver(place(rank), store, 5) for rank in (2, 1)}
    thread.join(5)
    assert sorted(ours) == [1, 2]
    for rank in (1, 2):
        ours[rank].send(("task", rank))
        assert theirs[rank].recv() == ("task", rank)
        thread = beside(functools.partial(theirs[rank].send_bytes, b"x" * 20_000_000))  # more than a store takes
        assert len(ours[rank].recv_bytes()) == 20_000_000
        thread.join(5)
        theirs[rank].close()
        with pytest.raises(EOFError):
            ours[rank].recv()
        ours[rank].close()


def test_a_rank_that_does_not_come_is_named_in_time() -> None:
    store = HashStore()
    problems: list[MachineError] = []

    def waits() -> None:
        with pytest.raises(MachineError) as problem:
            gather_connections(place(0), store, 0.3)
        problems.append(problem.value)

    start_s = time.perf_counter()
    thread = beside(waits)
    joined = join_driver(place(2), store, 5)
    thread.join(5)
    assert str(problems[0]) == "engine=torchrun: rank 1 did not join within 0.3 s"
    assert time.perf_counter() - start_s < 2
    with pytest.raises(EOFError):
        joined.recv()
    joined.close()


def test_a_stranger_is_not_let_in() -> None:
    store = HashStore()
    ours: dict[int, Connection] = {}
    thread = beside(lambda: ours.update(gather_connections(place(0, 2), store, 5)))
    store.wait(["shardproof/control"])
    _, port, host = store.get("shardproof/control").decode().split()
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall((36).to_bytes(4, "big") + b"\0" * 32 + (1).to_bytes(4, "big"))
        joined = join_driver(place(1, 2), store, 5)
        thread.join(5)
        ours[1].send("hello")
        assert joined.recv() == "hello"
    for connection in (joined, ours[1]):
        connection.close()


def test_a_rank_0_that_never_opens_is_told_in_time() -> None:
    with pytest.raises(MachineError, match=r"rank 0 did not open the control channel within 0.1 s"):
        join_driver(place(1), HashStore(), 0.1)


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
