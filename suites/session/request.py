"""The options of a session, checked without torch before anything is collected: one sentence for what breaks a rule.

`header` is the session's line in pytest's report.

check(config)     raises pytest.UsageError, with which pytest ends with exit status 4
"""

import os
from collections.abc import Sequence
from importlib import import_module

import pytest
from hypothesis import errors, settings

from shardproof.harness.dense_model import SUBJECT, check_modes, read_case
from shardproof.harness.errors import RequestError
from shardproof.harness.running.engines import check_engine
from shardproof.harness.running.ranks.capacity import admit
from shardproof.harness.running.request import seconds
from shardproof.harness.subject import NamedSubject, case_of, claims, resolve_subject, truth_of
from shardproof.pytest_options import OPTIONS, option_path, option_value
from shardproof.suites.drawing.profiles import PROFILES, register
from shardproof.suites.session import known_failures


def check(config: pytest.Config) -> None:
    """Raises UsageError for a wrong option."""
    try:
        for option in OPTIONS:
            option_value(config, option.name)
        check_engine(option_value(config, "engine"))
        world_sizes(option_value(config, "worlds"))
        seconds(option_value(config, "case_timeout"), "case-timeout")
        _check_device(option_value(config, "device"), faults=bool(option_value(config, "faults")))
        ours = option_value(config, "subject") == SUBJECT
        text = option_value(config, "case")
        if text and ours:
            read_case(text)
        if ours:
            check_modes(option_value(config, "modes"))
        _check_files(config)
        _check_profile(config)
        subject = subject_of(config)  # imports it, so last
        chosen_modes(subject, option_value(config, "modes"))
        truth_of(subject)
        if text:
            admit([case_of(text, subject)], option_value(config, "engine"))
    except RequestError as problem:
        raise pytest.UsageError(str(problem)) from problem


def header(config: pytest.Config) -> str:
    """The header line: the session's options, and what they name that does not exist."""
    words = [f"{name} {option_value(config, name)}" for name in ("subject", "modes", "worlds", "engine")]
    words += [f"truth {truth}" for truth in [option_value(config, "truth")] if truth]
    unknown = claims(subject_of(config)).unknown
    words += [f"without {mode}, which no case can have" for mode in unknown]
    if (path := option_path(config, "known_failures")) and not path.exists():
        words.append(f"no known failures, since {option_value(config, 'known_failures')} is not there")
    return "shardproof: " + ", ".join(words)


def _check_device(device: str, *, faults: bool) -> None:
    if device not in ("cpu", "cuda"):
        raise RequestError(f"device={device}: must be cpu or cuda; legal: --device cpu")
    if device == "cuda" and faults:
        raise RequestError(f"device={device}: faults are applied on the CPU; legal: --faults with --device cpu")
    if device == "cuda" and not import_module("torch").cuda.is_available():
        raise RequestError("device=cuda: this machine offers no CUDA device; legal: --device cpu")


def _check_profile(config: pytest.Config) -> None:
    if name := config.getoption("hypothesis_profile", None):
        register()
        try:
            settings.get_profile(name)
        except errors.InvalidArgument as problem:
            legal = " ".join(PROFILES)
            raise RequestError(f"hypothesis-profile={name}: is not a profile; legal: {legal}") from problem


def _check_files(config: pytest.Config) -> None:
    """Refuse files to read that cannot be read, and files to write that cannot be written."""
    if path := option_path(config, "known_failures"):
        known_failures.read_known_failures(path)
    if path := option_path(config, "run_dir"):
        try:
            path.mkdir(parents=True, exist_ok=True)
            writable = os.access(path, os.W_OK | os.X_OK)
        except OSError:
            writable = False
        if not writable:
            raise RequestError(f"run-dir={path}: cannot be written; legal: a folder with write permission")
    if option_value(config, "update_ledgers") and not option_value(config, "ledger_baseline"):
        raise RequestError("update-ledgers: needs the folder to write; legal: --ledger-baseline ledgers")
    path = option_path(config, "ledger_baseline")
    if path and not path.is_dir() and not option_value(config, "update_ledgers"):
        store = "pytest --pyargs shardproof.suites.test_ledger --ledger-baseline DIR --update-ledgers"
        raise RequestError(f"ledger-baseline={path}: no ledgers are stored there; legal: store them once with {store}")


def world_sizes(text: str) -> tuple[int, ...]:
    """The world sizes that an option names. Raises RequestError for anything but whole numbers above 1."""
    try:
        worlds = tuple(int(word) for word in text.split(","))
    except ValueError:
        worlds = ()
    if not worlds or min(worlds) < 2:
        raise RequestError(f"worlds={text}: must be whole numbers above 1, comma separated; legal: --worlds 2,3")
    return worlds


def subject_of(config: pytest.Config) -> NamedSubject:
    """The subject under test with the truth that was requested. Raises RequestError when there is none."""
    return resolve_subject(option_value(config, "subject"), option_value(config, "truth"))


def chosen_modes(subject: str | NamedSubject, text: str) -> Sequence[str]:
    """The modes to prove: all that the subject claims and a case can have, or those of them that are named."""
    return claims(resolve_subject(subject)).choose_modes(text)
