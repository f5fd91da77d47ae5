"""The rendezvous of a launched world: one connection from rank 0's process to every other one.

These connections are apart from the groups under test, so that a run that breaks the groups can still be reported, and
a process that ends is seen at once, as the end of its connection. The address and a token travel through the launcher's
store; any process that can read the store may join. Times are seconds, and every wait is bounded.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import time
from contextlib import ExitStack
from datetime import timedelta
from multiprocessing.connection import Connection

from torch.distributed import Store

from harness.engines.processes.launched.environment import Launched
from harness.errors import MachineError, ranks_text

_KEY = "shardproof/control"
_TOKEN_BYTES, _RANK_BYTES = 32, 4
_HELLO_S = 5.0
"""How long a process that has connected may take to send its rank."""
_IDLE_S, _PROBE_S, _PROBES = 10, 5, 3
"""A machine that vanished without closing its connections is noticed after about 25 s."""


def gather(place: Launched, store: Store, timeout_s: float) -> dict[int, Connection]:
    """Rank 0: the connections to all other ranks, by rank. Raises MachineError naming those that did not come."""
    token = secrets.token_bytes(_TOKEN_BYTES)
    end_s = time.monotonic() + timeout_s
    found: dict[int, Connection] = {}
    family, host = _own_address(place)
    with ExitStack() as on_error, socket.create_server((host, 0), family=family, backlog=place.world_size) as server:
        store.set(_KEY, f"{token.hex()} {server.getsockname()[1]} {host}")
        while len(found) < place.world_size - 1:
            server.settimeout(max(0.001, end_s - time.monotonic()))
            try:
                accepted, _ = server.accept()
            except TimeoutError:
                absent = sorted(set(range(1, place.world_size)) - found.keys())
                raise _lost(absent, f"did not join within {timeout_s:g} s") from None
            connection = on_error.enter_context(_connection(accepted))
            rank = _introduced(connection, token)
            if 0 < rank < place.world_size:  # any other is a stranger, and closed at the end
                found[rank] = connection
        on_error.pop_all()
    return found


def join(place: Launched, store: Store, timeout_s: float) -> Connection:
    """Every other rank: the connection to rank 0. Raises MachineError when rank 0 cannot be reached."""
    try:
        store.wait([_KEY], timedelta(seconds=timeout_s))
        token, port, host = store.get(_KEY).decode().split()
        connection = _connection(socket.create_connection((host, int(port)), timeout=timeout_s))
        connection.send_bytes(bytes.fromhex(token) + place.rank.to_bytes(_RANK_BYTES, "big"))
    except (RuntimeError, OSError) as problem:  # torch's errors of a store are RuntimeErrors
        text = f"did not open the control channel within {timeout_s:g} s: {str(problem).splitlines()[0]}"
        raise _lost([0], text) from problem
    return connection


def _lost(ranks: list[int], text: str) -> MachineError:
    many = "s" if len(ranks) > 1 else ""
    return MachineError(f"engine=torchrun: rank{many} {ranks_text(ranks)} {text}", ranks=ranks, positions=())


def _own_address(place: Launched) -> tuple[socket.AddressFamily, str]:
    """This machine's address on the way to where all processes meet: the others reach it by the same network."""
    known = socket.getaddrinfo(place.master_addr, place.master_port, type=socket.SOCK_DGRAM)
    family, kind, protocol, _, address = known[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing: it only finds the route
        return family, str(probe.getsockname()[0])


def _connection(wire: socket.socket) -> Connection:
    """The socket as a connection that carries messages, small ones at once, and notices a machine that vanished."""
    wire.settimeout(None)
    wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", _IDLE_S), ("TCP_KEEPINTVL", _PROBE_S), ("TCP_KEEPCNT", _PROBES)):
        if hasattr(socket, option):
            wire.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return Connection(wire.detach())


def _introduced(connection: Connection, token: bytes) -> int:
    """The rank that the other end sends with the token, -1 for a stranger."""
    try:
        if not connection.poll(_HELLO_S):
            return -1
        hello = connection.recv_bytes(_TOKEN_BYTES + _RANK_BYTES)
    except (EOFError, OSError):
        return -1
    known = hmac.compare_digest(hello[:_TOKEN_BYTES], token)
    return int.from_bytes(hello[_TOKEN_BYTES:], "big") if known else -1
