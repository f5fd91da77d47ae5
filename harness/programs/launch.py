"""The options of recording, the environment and command line of a recorded program, and its start in this process.

The options are the same for `shardproof record` and `python -m shardproof.record`. No torch is imported here. The
program takes over the process (exec): its exit code, signals, arguments, `__main__` and output are its own.
"""

import argparse
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from shardproof.harness.dense_model import read_case
from shardproof.harness.errors import RequestError
from shardproof.harness.programs.session import (
    VARIABLE,
    Options,
    ProgramSession,
    silence_of,
    steps_of,
    tools_of,
    values_of,
)
from shardproof.harness.traces.nsys_export import command_under_nsys, nsys_path

_HOOK = Path(__file__).parent / "hook"
_BLIND = {"-I": "ignores PYTHONPATH", "-E": "ignores PYTHONPATH", "-S": "imports no sitecustomize"}


def environment_of(session: ProgramSession, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment in which every Python process that initialises torch.distributed is recorded."""
    before = environ.get("PYTHONPATH")
    path = str(_HOOK) if not before else os.pathsep.join((str(_HOOK), before))
    return {**environ, VARIABLE: session.text, "PYTHONPATH": path}


def python_command(program: Sequence[str]) -> list[str]:
    """This interpreter with its own options, running a script or `-m module` with arguments.

    Raises RequestError for an option that stops Python from importing anything at its start.
    """
    place = sys.orig_argv.index("-m")
    options = sys.orig_argv[1:place]
    for option in options:
        if option in _BLIND:
            raise RequestError(f"python {option}: {_BLIND[option]}, which recording needs; legal: leave it out")
    return [sys.executable, *options, *program]


def check_startable(command: Sequence[str]) -> None:
    """Raises RequestError if there is no such command."""
    if shutil.which(command[0]) is None:
        raise RequestError(f"command={command[0]}: is not on PATH; legal: torchrun --nproc-per-node 4 train.py")


def with_tools(command: Sequence[str], session: ProgramSession) -> list[str]:
    """The command, under Nsight Systems if the session wants that. Raises RequestError if nsys is missing."""
    if "nsys" not in session.profile:
        return list(command)
    nsys = nsys_path()
    if nsys is None:
        raise RequestError("profile=nsys: nsys is not on PATH; legal: --profile torch, or install Nsight Systems")
    traces = Path(session.folder) / "traces"
    traces.mkdir(exist_ok=True)
    has_gpus = Path("/dev/nvidiactl").exists()
    profiled = command_under_nsys(str(nsys), traces / "nsys", command)
    return [word.replace("--trace=nvtx", "--trace=cuda,nvtx") for word in profiled] if has_gpus else profiled


def replace_by(command: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    """Let the command take over this process. Raises OSError if it cannot be started."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvpe(command[0], list(command), dict(environ))


def check_launch_words(tokens: str | None, case: str | None) -> Mapping[str, object]:
    """The words that are given, as `env.json` has them. Raises RequestError for a wrong one."""
    words: dict[str, object] = {}
    if tokens is not None:
        if not tokens.isdecimal() or not 0 < int(tokens) < 10**15:
            rule = "must be the tokens of all ranks in one step, at least 1"
            raise RequestError(f"tokens={tokens}: {rule}; legal: --tokens 4194304")
        words["tokens"] = int(tokens)
    if case is not None:
        words["case"] = str(read_case(case))
    return words


def request_of(arguments: argparse.Namespace, *, wraps: bool) -> Options:
    """The options of these arguments. Raises RequestError for a wrong one, and for nsys unless a command is run."""
    values = values_of(
        arguments.budget,
        wanted=arguments.values,
        dtype=arguments.dtype,
        dropout=not arguments.no_dropout,
        same_init=arguments.same_init,
        perturb=arguments.perturb,
    )
    steps = steps_of(arguments.steps or (None if values is None else "0:2"))
    profile = tools_of(arguments.profile, steps)
    if "nsys" in profile and not wraps:
        rule = "Nsight Systems must start the whole command"
        raise RequestError(f"profile=nsys: {rule}; legal: shardproof record --profile nsys -- torchrun ... train.py")
    words = check_launch_words(arguments.tokens, arguments.case)
    silence_s = silence_of(arguments.silence)
    return {"steps": steps, "profile": profile, "silence_s": silence_s, "stated": words, "values": values}
