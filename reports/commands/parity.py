"""`shardproof parity -- COMMAND A -- COMMAND B` and `shardproof compare A B --values`: two launches of one program.

Exit status: 0 all pass, 1 a check failed or could not be decided, or a launch failed; 2 a wrong request, or nothing was
recorded; 3 the machine failed.
"""

import argparse
import sys
from pathlib import Path

from shardproof.harness.parity.parity import ParityRequest, compare_recordings, prove_parity
from shardproof.harness.running.run_result import RunResult
from shardproof.reports.commands.result import show_result, write_page
from shardproof.reports.options.others import count_of_steps, folder_of_values
from shardproof.reports.printing.text import show_note
from shardproof.reports.stored.frames import load


def main(arguments: argparse.Namespace) -> int:
    """Record both launches and judge them."""
    first, second = arguments.commands
    request = ParityRequest(
        first=first,
        second=second,
        steps=count_of_steps(arguments.steps),
        timeout_s=float(arguments.timeout),
        out=Path(arguments.out),
        same_init=arguments.same_init,
        inproc=arguments.engine == "inproc",
        values=arguments.recorded,
        command=_command_of(arguments),
    )
    return _show(prove_parity(request, lambda words: show_note(words, sys.stderr)), arguments)


def compare_values(arguments: argparse.Namespace) -> int:
    """Judge two folders of recordings."""
    first, second, *controls = map(folder_of_values, (arguments.base, arguments.new, *arguments.control))
    command = ["shardproof", "compare", str(first), str(second), "--values"]
    command += [word for control in controls for word in ("--control", str(control))]
    command += _folder_words(arguments)
    return _show(compare_recordings(first, second, controls, Path(arguments.out), command), arguments)


def _folder_words(arguments: argparse.Namespace) -> list[str]:
    """Where run folders go, if that was requested."""
    return ["--out", arguments.out] if arguments.out != "runs" else []


def _command_of(arguments: argparse.Namespace) -> tuple[str, ...]:
    """The command that does this again."""
    words = ["shardproof", "parity", "--steps", arguments.steps]
    words += ["--dtype", arguments.dtype] if arguments.dtype else []
    words += ["--engine", "inproc"] if arguments.engine == "inproc" else []
    words += ["--same-init"] if arguments.same_init else []
    words += ["--no-dropout"] if arguments.no_dropout else []
    words += ["--budget", arguments.budget] if arguments.budget else []
    words += ["--timeout", arguments.timeout] if arguments.timeout != "300" else []
    words += _folder_words(arguments)
    return (*words, "--", *arguments.commands[0], "--", *arguments.commands[1])


def _show(result: RunResult, arguments: argparse.Namespace) -> int:
    run = load(result.path)
    problem = write_page(run)
    show_result(result, run, as_json=arguments.json, interrupted=False)
    if problem:
        show_note(problem, sys.stderr)
    return result.exit_status
