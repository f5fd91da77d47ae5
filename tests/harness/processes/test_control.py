"""The control channel of a launched world: everybody joins by rank, strangers do not, and every wait is bounded."""

from __future__ import annotations

import functools
import socket
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import pytest
from torch._C._distributed_c10d import HashStore

from harness.engines.processes.launched.environment import Launched
from harness.engines.processes.launched.rendezvous import gather, join
from harness.errors import MachineError


def place(rank: int, world_size: int = 3) -> Launched:
    return Launched(rank=rank, world_size=world_size, local_rank=rank, master_addr="127.0.0.1", master_port=29500)


def beside(call: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def test_every_rank_is_reached_by_its_number() -> None:
    store = HashStore()
    ours: dict[int, Connection] = {}
    thread = beside(lambda: ours.update(gather(place(0), store, 5)))
    theirs = {rank: join(place(rank), store, 5) for rank in (2, 1)}
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
            gather(place(0), store, 0.3)
        problems.append(problem.value)

    start_s = time.perf_counter()
    thread = beside(waits)
    joined = join(place(2), store, 5)
    thread.join(5)
    assert str(problems[0]) == "engine=torchrun: rank 1 did not join within 0.3 s"
    assert time.perf_counter() - start_s < 2
    with pytest.raises(EOFError):
        joined.recv()
    joined.close()


def test_a_stranger_is_not_let_in() -> None:
    store = HashStore()
    ours: dict[int, Connection] = {}
    thread = beside(lambda: ours.update(gather(place(0, 2), store, 5)))
    store.wait(["shardproof/control"])
    _, port, host = store.get("shardproof/control").decode().split()
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall((36).to_bytes(4, "big") + b"\0" * 32 + (1).to_bytes(4, "big"))
        joined = join(place(1, 2), store, 5)
        thread.join(5)
        ours[1].send("hello")
        assert joined.recv() == "hello"
    for connection in (joined, ours[1]):
        connection.close()


def test_a_rank_0_that_never_opens_is_told_in_time() -> None:
    with pytest.raises(MachineError, match=r"rank 0 did not open the control channel within 0.1 s"):
        join(place(1), HashStore(), 0.1)
