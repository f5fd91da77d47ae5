"""How launched processes find each other: a launcher's environment, then rank 0's control channel.

torchrun's words hold, SLURM's where they are missing. On the channel every rank joins by its number, strangers do not,
and every wait is bounded.
"""

import functools
import re
import socket
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import pytest
from torch._C._distributed_c10d import HashStore

from shardproof.harness.engines.processes.launched.rendezvous import (
    TORCHRUN_LINE,
    Launched,
    gather_connections,
    join_driver,
    launched_world,
)
from shardproof.harness.errors import MachineError, RequestError

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
