"""Options of the other commands, checked before anything is loaded that takes long."""

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shardproof.harness.dense_model import SUBJECT, check_words, read_case
from shardproof.harness.errors import RequestError
from shardproof.harness.programs.launch import check_startable
from shardproof.harness.programs.session import steps_of, values_of
from shardproof.harness.resolve import resolve
from shardproof.harness.running.request import seconds
from shardproof.harness.subject import cases_of, resolve_subject, truth_of, vocabulary
from shardproof.harness.traces.files import RANK, check_names
from shardproof.reports.comparing.compared_sides import check_name, is_trace, parse_limits, side_folder
from shardproof.reports.options.command_options import SLICED
from shardproof.reports.stored.files import run_folder

VALUES = "values"
"""Folder of a recording that holds values (harness.programs.values, which needs torch)."""
_LEGAL = "shardproof parity -- torchrun --nproc-per-node 1 train.py -- torchrun --nproc-per-node 2 train.py"


def commands_of(words: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The two commands behind `--`. Raises RequestError."""
    parts: list[list[str]] = []
    for word in words:
        if word == "--":
            parts.append([])
        elif parts:
            parts[-1].append(word)
        else:
            raise RequestError(f"{word}: each command stands behind a -- of its own; legal: {_LEGAL}")
    if len(parts) != 2 or not all(parts):
        rule = "takes two commands, each behind a -- of its own (one that has a -- in it: sh -c '...')"
        raise RequestError(f"{rule}; legal: {_LEGAL}")
    return tuple(parts[0]), tuple(parts[1])


def count_of_steps(text: str) -> int:
    """The number of steps that are compared. Raises RequestError."""
    if not (text.isascii() and text.isdecimal()) or not 1 <= int(text) < 10**4:
        raise RequestError(f"steps={text}: must be the number of steps to compare, at least 1; legal: --steps 2")
    return int(text)


def folder_of_values(name: str | None) -> Path:
    """A folder with recorded values. Raises RequestError where there is none."""
    legal = "a folder of `shardproof record --values`, or a launch of `parity`, such as runs/latest/first"
    if name is None:
        raise RequestError("values: two folders are compared, BASE and NEW; legal: compare BASE NEW --values")
    if not (Path(name) / VALUES).is_dir():
        raise RequestError(f"folder={name}: holds no values; legal: {legal}")
    return Path(name).resolve()  # `latest` is another run as soon as this one is stored


def _check_run_folder(arguments: argparse.Namespace) -> None:
    run_folder(arguments.run, matrix=arguments.command in ("show", "page"))


def _check_read(arguments: argparse.Namespace) -> None:
    steps_of(arguments.steps)
    arguments.rank_regex = arguments.rank_regex or RANK
    check_names(arguments.files, arguments.rank_regex)
    if arguments.case is not None:
        read_case(arguments.case)


def _check_parity(arguments: argparse.Namespace) -> None:
    arguments.commands = commands_of(arguments.program)
    for command in arguments.commands:
        check_startable(command)
    count_of_steps(arguments.steps)
    seconds(arguments.timeout, "timeout")
    arguments.recorded = values_of(
        arguments.budget,
        wanted=True,
        dtype=arguments.dtype,
        dropout=not arguments.no_dropout,
        same_init=None,
        perturb=None,
    )


def _check_compare(arguments: argparse.Namespace) -> None:
    if arguments.values:
        for name in (arguments.base, arguments.new, *arguments.control):
            folder_of_values(name)
        return
    if arguments.control:
        raise RequestError(f"control={arguments.control[0]}: is about values; legal: --values --control FOLDER")
    parse_limits(arguments.fail)
    if arguments.save_baseline is not None:
        check_name(arguments.save_baseline)
    if arguments.new is None:
        run_folder(arguments.base, matrix=False)
        if arguments.output or arguments.markdown:
            given = "-o" if arguments.output else "--markdown"
            rule = "writes what differs from another run, and none is named"
            raise RequestError(f"{given}: {rule}; legal: shardproof page {arguments.base}, which compares its modes")
    else:
        for name in (arguments.base, arguments.new):
            if not is_trace(name):
                side_folder(name, arguments.baselines)


def _check_faults(arguments: argparse.Namespace) -> None:
    seconds(arguments.timeout, "timeout")
    arguments.subject = resolve_subject(arguments.subject, arguments.truth or "")
    truth_of(arguments.subject)


def _check_predict(arguments: argparse.Namespace) -> None:
    """Check the words of texts by themselves: a text may mean several cases, and which are legal is decided later."""
    _check_memory(arguments.memory)
    ours = arguments.subject == SUBJECT
    if ours:
        _check_texts(arguments)
    arguments.subject = resolve_subject(arguments.subject)
    if vocabulary(arguments.subject) is not None:
        cases_of(arguments.cases, arguments.subject)
    elif not ours:
        _check_texts(arguments)


def _check_memory(text: str) -> None:
    try:
        legal = 0 < float(text) < math.inf
    except ValueError:
        legal = False
    if not legal:
        raise RequestError(f"memory={text}: must be the GiB of a rank, a positive number; legal: --memory 80")


def _check_texts(arguments: argparse.Namespace) -> None:
    for text in arguments.cases:
        words = [word for word in text.split() if word != "mode=all"]
        check_words(" ".join(words))
        if any(word.startswith("mode=") for word in words):
            read_case(" ".join(words))


def _check_slice(arguments: argparse.Namespace) -> None:
    text = " ".join(arguments.words)
    words: Any = resolve(SLICED)
    try:
        words.parse(text)
    except ValueError as problem:
        raise RequestError(f"slice {text!r}: {problem}") from problem


def check_options(arguments: argparse.Namespace) -> None:
    """Raise RequestError for a wrong option of a command."""
    if rule := _CHECKS.get(arguments.command):
        rule(arguments)


_CHECKS: dict[str, Callable[[argparse.Namespace], None]] = {
    "parity": _check_parity,
    "show": _check_run_folder,
    "page": _check_run_folder,
    "trace": _check_run_folder,
    "expect": _check_run_folder,
    "compare": _check_compare,
    "read": _check_read,
    "faults": _check_faults,
    "predict": _check_predict,
    "slice": _check_slice,
}
