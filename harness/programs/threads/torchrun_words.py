"""What a command of torchrun starts: how many ranks of which program, with which Python."""

import contextlib
import io
import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.run import get_args_parser

from shardproof.harness.errors import RequestError

_PYTHON = re.compile(r"python[0-9.]*")
_MODULES = ("torch.distributed.run", "torch.distributed.launch")
_LEGAL = "legal: torchrun --nproc-per-node 2 train.py, python train.py, or no --engine inproc"


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksOfProgram:
    """`ranks` of a program; `program` are its words as Python takes them: a script or -m and a module, arguments."""

    python: str
    ranks: int
    program: tuple[str, ...]


def read_torchrun(command: Sequence[str]) -> RanksOfProgram | None:
    """What a command of torchrun starts; None for a plain python, which is one process already.

    Raises RequestError for any other command, and for options that ranks as threads cannot have.
    """
    name = Path(command[0]).name
    if name == "torchrun":
        beside = Path(shutil.which(command[0]) or command[0]).with_name("python")
        return _read_options(str(beside) if beside.is_file() else sys.executable, command[1:])
    if not _PYTHON.fullmatch(name):
        raise RequestError(f"engine=inproc: ranks that {name} starts are no threads of one process; {_LEGAL}")
    if len(command) > 2 and command[1] == "-m" and command[2] in _MODULES:
        return _read_options(command[0], command[3:])
    return None


def _read_options(python: str, words: Sequence[str]) -> RanksOfProgram:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            given = get_args_parser().parse_args(list(words))
    except SystemExit:
        last = (said.getvalue().strip().splitlines() or ["no program"])[-1]
        raise RequestError(f"engine=inproc: torchrun would not start: {last}; {_LEGAL}") from None
    if str(given.nnodes) not in ("1", "1:1"):
        raise RequestError(f"engine=inproc: nnodes={given.nnodes}: threads are ranks of one machine; {_LEGAL}")
    if given.no_python:
        raise RequestError(f"engine=inproc: --no-python: threads run no other program than one of Python; {_LEGAL}")
    ranks = str(os.cpu_count() if given.nproc_per_node in ("auto", "cpu") else given.nproc_per_node)
    if not ranks.isdecimal() or not int(ranks):
        raise RequestError(f"engine=inproc: nproc-per-node={ranks}: must be a number of ranks; {_LEGAL}")
    module = ["-m"] if given.module else []
    program = (*module, given.training_script, *given.training_script_args)
    return RanksOfProgram(python=python, ranks=int(ranks), program=program)
