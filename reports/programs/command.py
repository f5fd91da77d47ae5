"""`shardproof record -- COMMAND`: a whole command, recorded in every process that initialises torch.distributed.

`shardproof hang DUMPS...`: which ranks diverge from the others, at which call, in which module and line.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import NoReturn

from shardproof.harness.engines.calls.matching import find_divergences
from shardproof.harness.errors import RequestError
from shardproof.harness.programs.launch import check_startable, environment_of, replace_by, request_of, with_tools
from shardproof.harness.programs.session import new_session
from shardproof.harness.traces.hangs import lines_of_findings, read_standings
from shardproof.reports.printing.text import show_message


def main(arguments: argparse.Namespace) -> NoReturn:
    """Let the command take over this process. Raises RequestError for a wrong option or command."""
    command = arguments.program[1:] if arguments.program[:1] == ["--"] else arguments.program
    if not command:
        raise RequestError("command: is missing; legal: shardproof record -- torchrun --nproc-per-node 4 train.py")
    check_startable(command)
    options = request_of(arguments, wraps=True)
    session = new_session(arguments.out, _name_of_script(command), command, options)
    words = with_tools(command, session)
    print(f"shardproof: recording into {os.path.relpath(session.folder)}", file=sys.stderr)
    replace_by(words, environment_of(session, os.environ))


def _name_of_script(command: list[str]) -> str:
    """The script among the words of a command, else its first word."""
    return Path(next((word for word in command if word.endswith(".py")), command[0])).stem


def hang_main(arguments: argparse.Namespace) -> int:
    """Print the findings. Exit status 1 if ranks diverge. Raises RequestError for files that are no dumps."""
    ranks = read_standings(arguments.dumps)
    found = find_divergences(ranks)
    for line in lines_of_findings(ranks, found):
        show_message(line, sys.stdout)
    return 1 if found else 0
