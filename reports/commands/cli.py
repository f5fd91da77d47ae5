"""The command line: `shardproof run | record | parity | read | hang | show | compare | page | trace | predict | slice |
checkpoint | faults | expect | names | new-subject | bench | doctor` and `help`.

Exit status: 0 all pass; 1 a check failed or could not be decided; 2 a wrong request, or nothing ran; 3 the machine
failed. Further ones: 130 interrupted, 141 the reader of the output has closed it.
"""

import argparse
import functools
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from difflib import get_close_matches
from importlib import import_module, metadata
from typing import Any, NoReturn

from shardproof.harness.dense_model import SUBJECT
from shardproof.harness.errors import ShardproofError
from shardproof.harness.interpreter import interrupted_after, open_missing_streams, without_garbage_collection
from shardproof.harness.run_folder import DISK_FAILED
from shardproof.harness.running.engines import ENGINES
from shardproof.reports.options.command_options import add_others
from shardproof.reports.printing.printable import printable

_TRUTH = 'the dense model to compare with; alone: the subject on one rank; "M:O tp=2": another subject on its ranks'
_TIMEOUT = "longest time of one run of a case, and of its dense model (60); a case may take several runs"
COMMANDS = {
    "run": "commands.run:main",
    "record": "programs.command:main",
    "parity": "commands.parity:main",
    "read": "commands.read:main",
    "hang": "programs.command:hang_main",
    "show": "commands.show:main",
    "compare": "commands.compare:main",
    "page": "commands.show:page_main",
    "trace": "commands.trace:main",
    "predict": "commands.predict:main",
    "slice": "commands.checkpoints:slice_main",
    "checkpoint": "commands.checkpoints:main",
    "faults": "commands.faults:main",
    "expect": "commands.expect:main",
    "names": "commands.names:main",
    "new-subject": "commands.word_help:new_subject_main",
    "bench": "commands.run:bench_main",
    "doctor": "commands.doctor:main",
    "help": "commands.word_help:main",
}
"""Command -> its function, below `shardproof.reports`."""
_WRONG_REQUEST, _MACHINE, _INTERRUPTED, _NO_READER = 2, 3, 130, 141


class _Parser(argparse.ArgumentParser):
    """A wrong option is reported in one line, like every wrong request."""

    def error(self, message: str) -> NoReturn:
        _print_error(f"{self.prog}: {message}; see {self.prog} --help")
        self.exit(_WRONG_REQUEST)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """What argparse returns. A word that this command does not know is its error, with the nearest option."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            options = [option for action in self._actions for option in action.option_strings]
            words = [word for word in unknown if word.startswith("-")] or unknown
            nearest = [near for word in words for near in get_close_matches(word.partition("=")[0], options, 1)]
            hint = f"; nearest: {' '.join(nearest)}" if nearest else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return found, unknown


class _Version(argparse.Action):
    """Prints the installed version, which is looked up only then."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:  # noqa: A002  (argparse's name)
        super().__init__(option_strings, dest, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"shardproof {metadata.version('shardproof')}")
        parser.exit(0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command of these words (default: the process's own) and return its exit status."""
    open_missing_streams()
    try:
        parsed = _build_parser(sys.argv[1:] if arguments is None else arguments).parse_args(arguments)
    except SystemExit as end:  # argparse has printed its help or its one message
        return end.code if isinstance(end.code, int) else _WRONG_REQUEST
    if parsed.command == "help" and parsed.topic is None:
        _build_parser().print_help()
        return 0
    if empty := _find_empty_option(parsed):
        _print_error(f"shardproof {parsed.command}: {empty}='': is empty; legal: a word, or leave it out")
        return _WRONG_REQUEST
    if not _has_folder():
        _print_error(f"shardproof {parsed.command}: the working directory was removed; legal: a folder that exists")
        return _WRONG_REQUEST
    parsed.isolated = arguments is None  # this process has not used autograd, so it can be forked
    try:
        with without_garbage_collection():
            from shardproof.reports.options.request import read_request  # noqa: PLC0415  (`--help` checks no option)

            parsed.request = read_request(parsed)
            with interrupted_after():  # an interruption while torch or pandas is imported breaks what comes after
                command = _import_command(parsed.command)
        status = command(parsed)
        sys.stdout.flush()
    except ShardproofError as error:
        _print_error(f"shardproof {parsed.command}: {error}")
        return error.exit_status
    except KeyboardInterrupt:
        print("\nshardproof: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        return _NO_READER
    except Exception as problem:  # a bug of ours, reported as such: 1 would mean that a check failed
        if isinstance(problem, OSError) and problem.errno in DISK_FAILED:
            where = problem.filename or "what it prints"
            _print_error(f"shardproof {parsed.command}: {where} cannot be written ({problem.strerror})")
            _drop_output()
            return _MACHINE
        _print_error(traceback.format_exc().rstrip())
        _print_error("shardproof: this is a bug in shardproof and no verdict on the subject")
        return _MACHINE
    return int(status)


def _has_folder() -> bool:
    try:
        return bool(os.getcwd())
    except OSError:
        return False


def _drop_output() -> None:
    """Forget buffered output, about which Python would complain once more when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _import_command(word: str) -> Callable[[argparse.Namespace], int]:
    """The function of this command, imported now: neither `--help` nor a wrong word waits for torch and pandas."""
    module, _, function = COMMANDS[word].partition(":")
    found: Callable[[argparse.Namespace], int] = getattr(import_module(f"shardproof.reports.{module}"), function)
    return found


def _print_error(message: str) -> None:
    """Print the error on stderr. rich, which folds it in a terminal, is loaded only then."""
    with suppress(OSError):  # its disk may be full too, and the exit status remains
        if sys.stderr.isatty():
            from shardproof.reports.printing.text import show_words  # noqa: PLC0415  (rich)

            show_words(message, sys.stderr)
        else:
            print(printable(message), file=sys.stderr)


def _find_empty_option(parsed: argparse.Namespace) -> str:
    """The first option whose word is empty, as that of an unset shell variable is; "" if there is none."""
    for name, value in vars(parsed).items():
        if name == "program":  # the words of the recorded command
            continue
        words = value if isinstance(value, list) else [value]
        if any(isinstance(word, str) and not word.strip() for word in words):
            return {"cases": "case", "output": "-o"}.get(name, name.replace("_", "-"))
    return ""


def _build_parser(words: Sequence[str] = ()) -> argparse.ArgumentParser:
    """The parser of these words: with the options of all commands, or of `run` alone if that is the command."""
    parser = _Parser(
        prog="shardproof",
        description="Proves that parallel training computes what the dense model does, and accounts for every byte.",
        epilog="exit status: 0 all pass, 1 a check failed or could not be decided, 2 a wrong request or nothing ran, "
        "3 the machine failed, 130 interrupted",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version, help="print the version of shardproof")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    add = functools.partial(commands.add_parser, allow_abbrev=False)
    _add_run(add("run", help="run cases, compare them with the dense model, record, report"))
    if list(words[:1]) != ["run"]:
        add_others(add, _TRUTH, _TIMEOUT)
    return parser


def _add_run(run: argparse.ArgumentParser) -> None:
    run.description = "Run cases on a subject. Without a CASE: the default cases of its modes, on up to 8 ranks."
    run.epilog = 'example: shardproof run "mode=tp-sp tp=4 kv_heads=4 dtype=float64" --data corpus.txt'
    run.add_argument("cases", nargs="*", metavar="CASE", help="one case each, key=value words in quotes (help case)")
    run.add_argument("--subject", default=SUBJECT, metavar="M:O", help=f"the code to verify ({SUBJECT})")
    run.add_argument("--truth", metavar="M:O|alone", help=_TRUTH)
    run.add_argument("--modes", default="all", metavar="all|a,b", help="modes to run when no CASE is given (all)")
    run.add_argument(
        "--deep", action="store_true", help="without a CASE: every default case in every mode, of two layers and steps"
    )
    run.add_argument("--engine", choices=tuple(ENGINES), default="inproc", help="how ranks are run (inproc)")
    run.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where tensors live (cpu)")
    run.add_argument("--data", metavar="PATH", help="text, JSONL or tokenized data for every case")
    run.add_argument("--variant", metavar="NAME", help="a known deviation of real systems, in every case: it must fail")
    run.add_argument(
        "--profile",
        metavar="torch,nsys",
        help="run each case under these profilers too, and hold their events against the recorder's",
    )
    run.add_argument("--profile-steps", metavar="FIRST:END", help="steps they watch; END is not included (all)")
    run.add_argument("--emit-repro", metavar="FILE", help="the first failure, shrunk, as a script of its own")
    run.add_argument("--timeout", default="60", metavar="SECONDS", help=_TIMEOUT)
    run.add_argument(
        "--when", default="20", metavar="SECONDS", help="longest search for a failure's line `when:` (20); 0: none"
    )
    run.add_argument("--fail-fast", action="store_true", help="stop after the first case that does not pass")
    run.add_argument("--out", default="runs", metavar="DIR", help="where run folders go (runs)")
    run.add_argument(
        "--json", action="store_true", help="the result as one JSON object on stdout, and nothing else there"
    )
