"""What a launched process does for its rank: it ends when told, or when rank 0 vanishes; it tells of a dead child."""

from __future__ import annotations

import os
import threading
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import pytest

from harness.engines.processes.launched.agent import ANSWERED, DIED, END, KILL, RUN, START, WHERE, relay
from harness.engines.processes.launched.environment import Launched

PLACE = Launched(rank=1, world_size=2, local_rank=1, master_addr="127.0.0.1", master_port=29500)
LIMIT_S = 60.0


def echoing(pipe: Connection, place: Launched) -> None:
    """A child that says its orders back, with its rank, and dies of one that says so."""
    while True:
        order = pipe.recv_bytes()
        if order.endswith(b"die"):
            os._exit(7)
        pipe.send_bytes(bytes([place.rank]) + order)


class Relayed:
    """A relay in a thread, and rank 0's end of its connection."""

    def __init__(self) -> None:
        self.hub, theirs = Pipe()
        self.ended: list[bool] = []
        self.thread = threading.Thread(target=lambda: self.ended.append(relay(theirs, echoing, PLACE)), daemon=True)
        self.thread.start()

    def heard(self) -> bytes:
        """What rank 0 hears next."""
        assert self.hub.poll(LIMIT_S)
        return self.hub.recv_bytes()

    def end(self) -> bool:
        """Wait for the end; whether it was told to end."""
        self.thread.join(LIMIT_S)
        return self.ended[0]


@pytest.mark.parametrize("told", [True, False])
def test_a_relay_ends_with_rank_0_and_knows_whether_it_was_told(told: bool) -> None:
    relayed = Relayed()
    if told:
        relayed.hub.send_bytes(END)
    else:
        relayed.hub.close()
    assert relayed.end() is told


def test_orders_and_answers_pass_and_a_dead_child_is_told_and_replaced() -> None:
    relayed = Relayed()
    for order in (WHERE, RUN + b"lost"):  # there is no child yet, and nobody who could answer
        relayed.hub.send_bytes(order)
    relayed.hub.send_bytes(START + b"1")
    assert relayed.heard() == ANSWERED + b"\1" + START + b"1"
    relayed.hub.send_bytes(RUN + b"it")
    assert relayed.heard() == ANSWERED + b"\1" + RUN + b"it"
    relayed.hub.send_bytes(RUN + b"die")
    assert relayed.heard() == DIED + b"7"
    relayed.hub.send_bytes(START + b"2")
    assert relayed.heard() == ANSWERED + b"\1" + START + b"2"
    relayed.hub.send_bytes(KILL)
    relayed.hub.send_bytes(END)
    assert relayed.end()
    with pytest.raises(EOFError):
        relayed.hub.recv_bytes()  # a child that was ended on demand is no news
