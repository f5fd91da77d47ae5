"""The world that torchrun or SLURM launched, as one of its processes reads it from the environment.

torchrun gives RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. Where RANK is missing, SLURM's SLURM_PROCID,
SLURM_NTASKS, SLURM_LOCALID and the first node of SLURM_JOB_NODELIST stand for them, and a port made of SLURM_JOB_ID.
Times are seconds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import Store
from torch.distributed.rendezvous import rendezvous

from harness.errors import MachineError, RequestError

TORCHRUN_LINE = 'torchrun --nnodes 1 --nproc-per-node 2 -m shardproof run "mode=tp tp=2" --engine torchrun'
"""A command that makes the environment; torchrun on every node, with --nnodes N and --node-rank, for several."""

_TORCHRUN = {"rank": "RANK", "world_size": "WORLD_SIZE", "local_rank": "LOCAL_RANK"}
_SLURM = {"rank": "SLURM_PROCID", "world_size": "SLURM_NTASKS", "local_rank": "SLURM_LOCALID"}
_FIRST_PORT, _PORTS = 15000, 15000
"""Below the ports that Linux hands out by itself, so that a job's number rarely meets a taken one."""


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
            raise MachineError(text, ranks=(self.rank,), positions=()) from problem
        return store


def launched(environ: Mapping[str, str]) -> Launched:
    """The world as this environment describes it. Raises RequestError when there was no launcher, or for a wrong value.

    In an environment of both (torchrun started by SLURM) torchrun's variables hold.
    """
    if "RANK" in environ or not any(name in environ for name in _SLURM.values()):
        words, name = _words(environ, _TORCHRUN), "MASTER_ADDR"
        addr, port = _word(environ, name), _whole(environ, "MASTER_PORT", 1, 65535)
    else:
        words = _words(environ, _SLURM)
        addr = environ.get("MASTER_ADDR") or _first_node(_word(environ, "SLURM_JOB_NODELIST"))
        port = _FIRST_PORT + _whole(environ, "SLURM_JOB_ID", 0) % _PORTS
        port = _whole(environ, "MASTER_PORT", 1, 65535) if "MASTER_PORT" in environ else port
    return Launched(**words, master_addr=addr, master_port=port)


def _words(environ: Mapping[str, str], names: Mapping[str, str]) -> dict[str, int]:
    """Rank, world size and local rank, each within its bounds."""
    for name in names.values():
        _word(environ, name)
    world_size = _whole(environ, names["world_size"], 1)
    rank = _whole(environ, names["rank"], 0, world_size - 1)
    return {"rank": rank, "world_size": world_size, "local_rank": _whole(environ, names["local_rank"], 0)}


def _word(environ: Mapping[str, str], name: str) -> str:
    value = environ.get(name, "")
    if not value:
        needed = " ".join((*_TORCHRUN.values(), "MASTER_ADDR", "MASTER_PORT"))
        slurm = " ".join((*_SLURM.values(), "SLURM_JOB_NODELIST", "SLURM_JOB_ID"))
        rule = f"must be in the environment, as torchrun sets {needed}, or SLURM {slurm}"
        raise RequestError(f"engine=torchrun: {name} is not set; it {rule}; legal: {TORCHRUN_LINE}")
    return value


def _whole(environ: Mapping[str, str], name: str, least: int, most: int | None = None) -> int:
    text = _word(environ, name)
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
