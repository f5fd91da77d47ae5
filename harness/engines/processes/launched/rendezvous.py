"""How the processes of a launched world find each other: the launcher's environment, and the control channel.

torchrun gives RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. Where RANK is missing, SLURM's SLURM_PROCID,
SLURM_NTASKS, SLURM_LOCALID and the first node of SLURM_JOB_NODELIST stand for them, and a port made of SLURM_JOB_ID.

The control channel is one connection from rank 0's process to every other one, apart from the groups under test. So a
run that breaks the groups is still reported, and a process's end seen at once. The address and a token travel through
the launcher's store; any process that can read the store may join. Times are seconds, and every wait is bounded.
"""

import hmac
import re
import secrets
import socket
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection

import torch.distributed as dist
from torch.distributed import Store
from torch.distributed.rendezvous import rendezvous

from shardproof.harness.errors import MachineError, RequestError, name_ranks

TORCHRUN_LINE = 'torchrun --nnodes 1 --nproc-per-node 2 -m shardproof run "mode=tp tp=2" --engine torchrun'
"""A command that sets this environment; for several nodes, torchrun on each with --nnodes N and --node-rank."""

_TORCHRUN = {"rank": "RANK", "world_size": "WORLD_SIZE", "local_rank": "LOCAL_RANK"}
_SLURM = {"rank": "SLURM_PROCID", "world_size": "SLURM_NTASKS", "local_rank": "SLURM_LOCALID"}
_FIRST_PORT, _PORTS = 15000, 15000
"""Below the ports that Linux assigns by itself, so that a job's number rarely gives a taken one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """This process's place in the launched world. `master_addr` and `master_port` are where all processes meet."""

    rank: int
    world_size: int
    local_rank: int
    master_addr: str
    master_port: int

    @property
    def drives(self) -> bool:
        """Whether this process draws cases, checks and prints; all others serve it."""
        return self.rank == 0

    def store(self, timeout_s: float) -> Store:
        """The store at which the processes meet: torchrun's own, or one that rank 0 holds. Raises MachineError."""
        url = f"tcp://{self.master_addr}:{self.master_port}"
        timeout = timedelta(seconds=timeout_s)
        try:
            store: Store = next(rendezvous(url, self.rank, self.world_size, timeout=timeout))[0]
        except (dist.DistError, ValueError, OSError) as problem:
            reason = str(problem).splitlines()[0]
            text = f"rank {self.rank} of {self.world_size} cannot meet the others at {url}: {reason}"
            raise MachineError(text, ranks=(self.rank,)) from problem
        return store


def launched_world(environ: Mapping[str, str]) -> Launched:
    """The world that this environment describes. Raises RequestError without a launcher, or for a wrong value.

    In an environment of both (torchrun started by SLURM) torchrun's variables hold.
    """
    if "RANK" in environ or not any(name in environ for name in _SLURM.values()):
        words = _read_words(environ, _TORCHRUN)
        addr, port = _read_word(environ, "MASTER_ADDR"), _read_whole_number(environ, "MASTER_PORT", 1, 65535)
    else:
        words = _read_words(environ, _SLURM)
        addr = environ.get("MASTER_ADDR") or _first_node(_read_word(environ, "SLURM_JOB_NODELIST"))
        port = _FIRST_PORT + _read_whole_number(environ, "SLURM_JOB_ID", 0) % _PORTS
        port = _read_whole_number(environ, "MASTER_PORT", 1, 65535) if "MASTER_PORT" in environ else port
    return Launched(**words, master_addr=addr, master_port=port)


def _read_words(environ: Mapping[str, str], names: Mapping[str, str]) -> dict[str, int]:
    """Rank, world size and local rank, each within its bounds."""
    for name in names.values():
        _read_word(environ, name)
    world_size = _read_whole_number(environ, names["world_size"], 1)
    rank = _read_whole_number(environ, names["rank"], 0, world_size - 1)
    return {"rank": rank, "world_size": world_size, "local_rank": _read_whole_number(environ, names["local_rank"], 0)}


def _read_word(environ: Mapping[str, str], name: str) -> str:
    value = environ.get(name, "")
    if not value:
        needed = " ".join((*_TORCHRUN.values(), "MASTER_ADDR", "MASTER_PORT"))
        slurm = " ".join((*_SLURM.values(), "SLURM_JOB_NODELIST", "SLURM_JOB_ID"))
        rule = f"must be in the environment, as torchrun sets {needed}, or SLURM {slurm}"
        raise RequestError(f"engine=torchrun: {name} is not set; it {rule}; legal: {TORCHRUN_LINE}")
    return value


def _read_whole_number(environ: Mapping[str, str], name: str, least: int, most: int | None = None) -> int:
    text = _read_word(environ, name)
    value = int(text) if text.isascii() and text.isdigit() else -1
    if value < least or (most is not None and value > most):
        rule = f"must be a whole number from {least}" + ("" if most is None else f" to {most}")
        raise RequestError(f"engine=torchrun: {name}={text} {rule}; legal: {name}={least}")
    return value


def _first_node(nodes: str) -> str:
    """The first host of SLURM's list: gpu[07-09,12]-ib,login1 gives gpu07-ib."""
    found = re.match(r"([^,\[]+)(?:\[(\w+)[^\]]*\]([^,\[]*))?", nodes)
    if found is None:
        rule = "must be a list of hosts"
        raise RequestError(f"engine=torchrun: SLURM_JOB_NODELIST={nodes} {rule}; legal: SLURM_JOB_NODELIST=node[01-04]")
    return "".join(part or "" for part in found.groups())


_KEY = "shardproof/control"
_TOKEN_BYTES, _RANK_BYTES = 32, 4
_HELLO_S = 5.0
"""How long a process that has connected may take to send its rank."""
_IDLE_S, _PROBE_S, _PROBES = 10, 5, 3
"""A machine that vanished without closing its connections is noticed after about 25 s."""


def gather_connections(place: Launched, store: Store, timeout_s: float) -> dict[int, Connection]:
    """Rank 0: the connections to all other ranks, by rank. Raises MachineError naming those that did not come."""
    token = secrets.token_bytes(_TOKEN_BYTES)
    end_s = time.monotonic() + timeout_s
    connections: dict[int, Connection] = {}
    family, host = _own_address(place)
    with ExitStack() as on_error, socket.create_server((host, 0), family=family, backlog=place.world_size) as server:
        store.set(_KEY, f"{token.hex()} {server.getsockname()[1]} {host}")
        while len(connections) < place.world_size - 1:
            server.settimeout(max(0.001, end_s - time.monotonic()))
            try:
                accepted, _ = server.accept()
            except TimeoutError:
                absent = sorted(set(range(1, place.world_size)) - connections.keys())
                raise _lost_ranks_error(absent, f"did not join within {timeout_s:g} s") from None
            connection = on_error.enter_context(_as_connection(accepted))
            rank = _read_introduction(connection, token)
            if 0 < rank < place.world_size:  # all others are strangers, and closed at the end
                connections[rank] = connection
        on_error.pop_all()
    return connections


def join_driver(place: Launched, store: Store, timeout_s: float) -> Connection:
    """Every other rank: the connection to rank 0. Raises MachineError when rank 0 cannot be reached."""
    try:
        store.wait([_KEY], timedelta(seconds=timeout_s))
        token, port, host = store.get(_KEY).decode().split()
        connection = _as_connection(socket.create_connection((host, int(port)), timeout=timeout_s))
        connection.send_bytes(bytes.fromhex(token) + place.rank.to_bytes(_RANK_BYTES, "big"))
    except (RuntimeError, OSError) as problem:  # torch's errors of a store are RuntimeErrors
        text = f"did not open the control channel within {timeout_s:g} s: {str(problem).splitlines()[0]}"
        raise _lost_ranks_error([0], text) from problem
    return connection


def _lost_ranks_error(ranks: list[int], text: str) -> MachineError:
    return MachineError(f"engine=torchrun: {name_ranks(ranks)} {text}", ranks=ranks)


def _own_address(place: Launched) -> tuple[socket.AddressFamily, str]:
    """The address of this machine in the network by which all processes meet, where the others reach it."""
    known = socket.getaddrinfo(place.master_addr, place.master_port, type=socket.SOCK_DGRAM)
    family, kind, protocol, _, address = known[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing: it only finds the route
        return family, str(probe.getsockname()[0])


def _as_connection(wire: socket.socket) -> Connection:
    """The socket as a connection that carries messages, small ones at once, and notices a machine that vanished."""
    wire.settimeout(None)
    wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", _IDLE_S), ("TCP_KEEPINTVL", _PROBE_S), ("TCP_KEEPCNT", _PROBES)):
        if hasattr(socket, option):
            wire.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return Connection(wire.detach())


def _read_introduction(connection: Connection, token: bytes) -> int:
    """The rank that the other end sends with the token, -1 for a stranger."""
    try:
        if not connection.poll(_HELLO_S):
            return -1
        hello = connection.recv_bytes(_TOKEN_BYTES + _RANK_BYTES)
    except (EOFError, OSError):
        return -1
    known = hmac.compare_digest(hello[:_TOKEN_BYTES], token)
    return int.from_bytes(hello[_TOKEN_BYTES:], "big") if known else -1
