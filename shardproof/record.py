"""`python -m shardproof.record [options] train.py args...`: a script recorded, one process or every rank of a launcher.

    torchrun --nproc-per-node 4 -m shardproof.record --steps 10:20 train.py --lr 0.1
    torchrun --nproc-per-node 4 -m shardproof.record -m my_package.train --lr 0.1

The script runs as if Python had been given it. `shardproof record -- COMMAND` records a whole command.
"""

import argparse
import importlib.util
import os
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

from shardproof.harness.errors import RequestError, ShardproofError, error_text
from shardproof.harness.programs.launch import environment_of, python_command, replace_by, request_of
from shardproof.harness.programs.session import shared_session
from shardproof.reports.options.command_options import add_options

_WRONG_REQUEST = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Record the program of these words (default: the process's own). Returns 2 for a wrong request, else never."""
    parser = argparse.ArgumentParser(
        prog="python -m shardproof.record",
        description="Record the collectives of a training script, unmodified, into one run folder of all ranks.",
        epilog="example: torchrun --nproc-per-node 4 -m shardproof.record --steps 10:20 train.py --lr 0.1",
        allow_abbrev=False,
    )
    add_options(parser)
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE ...", help="a module instead")
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="SCRIPT ...", help="the script and its arguments")
    parsed = parser.parse_args(arguments)
    try:
        options = request_of(parsed, wraps=False)
        program = _program(parsed)
        name = program[1] if parsed.module else Path(program[0]).stem
        session, made = shared_session(parsed.out, name, program, os.environ, options)
        if made:
            print(f"shardproof: recording into {os.path.relpath(session.folder)}", file=sys.stderr)
        replace_by(python_command(program), environment_of(session, os.environ))
    except ShardproofError as problem:
        print(f"shardproof: {problem}", file=sys.stderr)
        return _WRONG_REQUEST


def _program(parsed: argparse.Namespace) -> list[str]:
    program = parsed.program if parsed.module is None else ["-m", *parsed.module]
    if not program or program == ["-m"]:
        raise RequestError("program: is missing; legal: python -m shardproof.record train.py")
    _check(program)
    return list(program)


def _check(program: Sequence[str]) -> None:
    """Raise RequestError for a program that Python cannot begin: nothing of it would be recorded."""
    legal = "legal: python -m shardproof.record train.py"
    if program[0] == "-m":
        package = program[1].partition(".")[0]
        if importlib.util.find_spec(package) is None:
            raise RequestError(f"program={program[1]}: there is no module {package!r}; {legal}")
    elif not Path(program[0]).is_dir() and not zipfile.is_zipfile(program[0]):
        try:
            compile(Path(program[0]).read_bytes(), program[0], "exec", dont_inherit=True)
        except OSError as problem:
            raise RequestError(f"program={program[0]}: cannot be opened ({problem.strerror}); {legal}") from problem
        except (SyntaxError, ValueError) as problem:
            raise RequestError(f"program={program[0]}: {error_text(problem)}; {legal}") from problem


if __name__ == "__main__":
    sys.exit(main())
