"""Forks programs whose ranks are threads: `python start.py`, with one order per line of its input.

torch is imported once for all launches of a command, with the parts of it that most programs load. An order is a JSON
object: `session`, `ranks`, `program` (its words), `folder` to run in, `environ`, and `output`, a file for what it
prints. Two lines answer it: the id of its process, which leads a group of its own, and its exit status (negative: a
signal) when it has ended.

Run by the program's Python, which may lack shardproof: then our own comes last on its path.
"""

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed.fsdp
import torch.distributed.tensor.parallel  # noqa: F401  (what most programs load is loaded once)


def serve_orders(run_program: Callable[[int, str, Sequence[str]], int]) -> None:
    """Execute orders until the input ends."""
    for line in sys.stdin:
        order = json.loads(line)
        process = os.fork()
        if not process:
            _enter(order)
            sys.exit(run_program(order["ranks"], order["session"], order["program"]))
        print(process, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)


def _enter(order: dict[str, Any]) -> None:
    """Become a process of its own: process group, folder, environment, input and output."""
    os.setsid()
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environ"])
    output = os.open(order["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for given, at in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(given, at)


if __name__ == "__main__":
    sys.path.pop(0)  # this folder
    if importlib.util.find_spec("shardproof") is None:
        sys.path.append(str(Path(__file__).absolute().parents[4]))
    from shardproof.harness.programs.threads.program import run_program

    serve_orders(run_program)
