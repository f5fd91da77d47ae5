"""Options of a command, checked before anything is loaded that takes long: torch, pandas.

`read_request` raises for a wrong word or value of any command. The request of `shardproof run` is `build_request`: all
that needs no torch is checked first; then the subject is imported, which mostly needs it. `Request` is a class of
`harness.running.request`.

Steps of --profile-steps count from 0; FIRST:END are those from FIRST on, END not included.
"""

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, chdir, nullcontext
from importlib import import_module
from pathlib import Path

from shardproof.harness.dense_model import SUBJECT, check_modes, dense_model, in_own_words, parse_cases
from shardproof.harness.errors import RequestError, guard_file
from shardproof.harness.interpreter import interrupted_after
from shardproof.harness.programs.session import steps_of
from shardproof.harness.protocols import CaseLike, case_text
from shardproof.harness.running.ranks.capacity import select_admitted_cases
from shardproof.harness.running.request import Request, check_saved, loading_what_exists, seconds
from shardproof.harness.subject import (
    NamedSubject,
    Unanswered,
    cases_of,
    claims,
    offers,
    own_cases,
    refusal,
    resolve_subject,
    truth_of,
    vocabulary,
)
from shardproof.reports.options.others import check_options


def with_data(cases: Sequence[CaseLike], path: str | None) -> tuple[CaseLike, ...]:
    """The cases with this text, if any, as their data. Raises RequestError where the case language has no such path."""
    try:
        return tuple(cases) if path is None else tuple(case.but(data=path) for case in cases)
    except ValueError as problem:
        raise RequestError(str(problem)) from problem


def check_data(path: str) -> None:
    """Raise RequestError for data that are not there; they are read when the cases are known."""
    try:
        dense_model().find_data(Path(path).expanduser())
    except (ValueError, RuntimeError) as problem:
        raise RequestError(f"data={path}: {problem}") from problem


TOOLS = ("torch", "nsys")


def profiled_tools(arguments: argparse.Namespace) -> tuple[str, ...]:
    """The tools of --profile, each once. Raises RequestError for an unknown one, or if there is nothing to profile."""
    if arguments.profile is None:
        return ()
    tools = tuple(dict.fromkeys(word for word in arguments.profile.split(",") if word))
    if not tools:
        raise RequestError(f"profile={arguments.profile}: names no witness; legal: {','.join(TOOLS)}")
    for tool in tools:
        if tool not in TOOLS:
            raise RequestError(f"profile={tool}: is not a profiler of cases; legal: {','.join(TOOLS)}")
    if arguments.engine == "dry":
        raise RequestError("profile: dry ranks have shapes and no times; legal: --engine inproc")
    return tools


def profiled_steps(arguments: argparse.Namespace, cases: Sequence[CaseLike]) -> range | None:
    """The steps of --profile-steps, None for all. Raises RequestError unless every case has them."""
    word = arguments.profile_steps
    if word is None:
        return None
    if not arguments.profile:
        rule = "chooses among the steps that --profile watches, and there is no --profile"
        raise RequestError(f"profile-steps={word}: {rule}; legal: --profile torch --profile-steps 0:1")
    shortest = min(cases, key=lambda case: case.steps, default=None)
    legal = f"0:{shortest.steps if shortest else 1}"
    steps = range(*(steps_of(word, "profile-steps", legal) or ()))
    if shortest and steps.stop > shortest.steps:
        has = f"{shortest.steps} step{'s' if shortest.steps > 1 else ''}, counted from 0"
        raise RequestError(f"profile-steps={word}: case {str(shortest)!r} has {has}; legal: {legal}")
    return steps


def check_target(file: str) -> None:
    """Raise RequestError unless a file can be written there, before minutes are spent on it; leave no new one."""
    fresh = not os.path.lexists(file)
    with check_writing(file):
        # Not blocking: a pipe without a reader is an error and no endless wait.
        os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK, 0o666))
        if fresh:
            os.unlink(file)


def check_writing(file: str) -> AbstractContextManager[None]:
    """Write there. Raises RequestError, naming the file and the reason, when the system refuses."""
    return guard_file(f"emit-repro={file}", "a file in a folder with write permission")


LAUNCHED = "torchrun"
"""The engine of ranks that torchrun has launched: all run this command, and only rank 0 does the work."""
REPEATED = 3
"""Every third default case of our own subject is run twice: second runs of all would cost more than they find."""
_OF_OUR_DECODER = ("variant", "data", "deep")
"""Options that need the case language of our decoder."""


def read_request(arguments: argparse.Namespace) -> Request | None:
    """The request of `shardproof run`. None for other commands, and on launched ranks, where rank 0 reads it later.

    Raises RequestError for a wrong option.
    """
    _note_unquoted(getattr(arguments, "cases", ()))
    if arguments.command == "run":
        return None if arguments.engine == LAUNCHED else build_request(arguments)
    with chdir("."):  # a subject may go elsewhere when it is imported
        check_options(arguments)
    return None


def build_request(arguments: argparse.Namespace) -> Request:
    """The request of these options of `shardproof run`. Raises RequestError before anything runs."""
    out = Path(arguments.out).absolute()  # now: the import of a subject may change the folder too
    with chdir("."):
        _options_checked(arguments)
        given = _given_cases(arguments) if arguments.subject == SUBJECT else ()  # before torch is imported
        with interrupted_after() if arguments.subject == SUBJECT else nullcontext():  # torch: it would abort
            subject = resolve_subject(arguments.subject, arguments.truth or "")
        given = given or _given_cases(arguments, subject)
        truth_of(subject)  # raises for a truth that is none
        if arguments.device == "cuda" and not import_module("torch").cuda.is_available():
            raise RequestError("device=cuda: this machine offers no CUDA device; legal: --device cpu")
        cases = given or _default_cases(arguments, subject)
        steps = profiled_steps(arguments, cases)
        _check_readable(loading_what_exists(select_admitted_cases(cases, arguments.engine)))
    most = 1 if arguments.cases else min(2, os.cpu_count() or 1)
    return Request(
        cases=cases,
        subject=subject,
        engine=arguments.engine,
        device=arguments.device,
        out=out,
        asked_out=arguments.out,
        timeout_s=seconds(arguments.timeout, "timeout"),
        command=tuple(sys.argv),
        profile=profiled_tools(arguments),
        profile_steps=steps,
        processes=most if getattr(arguments, "isolated", False) else 0,
        fail_fast=arguments.fail_fast,
        when_s=seconds(arguments.when, "when", "0"),
        repeat_every=REPEATED if arguments.subject == SUBJECT and not (given or arguments.deep) else 1,
    )


def _note_unquoted(cases: Sequence[str]) -> None:
    """Note on stderr that words without quotes are several cases and look like one; only rank 0 prints the note."""
    keys = [text.partition("=")[0] for text in cases if len(text.split()) == 1]
    first = os.environ.get("RANK", "0") == "0"
    if first and len(keys) > 1 and len({*keys}) == len(keys) == len(cases):
        quoted = f'"{" ".join(cases)}"'
        from shardproof.reports.printing.text import show_note  # noqa: PLC0415  (rich may be missing: doctor tells it)

        show_note(f"these words are {len(cases)} cases, one each; as one case: {quoted}", sys.stderr)


def _check_readable(cases: Sequence[CaseLike]) -> None:
    """Read the first batch of every case: data that cannot be read are a wrong request, and no failure of the subject.

    Raises:
        RequestError: data that a case names cannot be read.
    """
    for case in cases:
        if in_own_words(case):
            continue
        try:
            dense_model().read_data(case)
        except (ValueError, OSError) as problem:
            word = "" if getattr(problem, "key", "") else f"data={getattr(case, 'data', '')}: "
            raise RequestError(f"{word}{problem}") from problem


def _options_checked(arguments: argparse.Namespace) -> None:
    """Check every rule that needs neither the subject nor torch."""
    if arguments.emit_repro is not None:
        check_target(arguments.emit_repro)
    seconds(arguments.timeout, "timeout")
    profiled_tools(arguments)
    _check_choice(arguments)
    if arguments.data is not None:
        check_data(arguments.data)


def _given_cases(arguments: argparse.Namespace, subject: NamedSubject | None = None) -> tuple[CaseLike, ...]:
    """The cases on the command line as this subject reads them; without a subject, as cases of our decoder."""
    own = subject is not None and vocabulary(subject) is not None
    if own and (word := next((word for word in _OF_OUR_DECODER if getattr(arguments, word)), "")):
        rule = f"is for cases of our decoder, and {arguments.subject} has words of its own"
        raise RequestError(f"{word.replace('_', '-')}: {rule}; legal: its own words in a CASE")
    cases = parse_cases(arguments.cases) if subject is None else cases_of(arguments.cases, subject)
    if arguments.variant is not None:
        cases = _as_variant(cases, arguments.variant, given=True)
    cases = with_data(cases, arguments.data)
    profiled_steps(arguments, cases)
    check_saved(cases)
    return cases


def _check_choice(arguments: argparse.Namespace) -> None:
    """The options that choose among default cases."""
    if arguments.cases and arguments.modes != "all":
        legal = "mode= in the case, or --modes without a CASE"
        raise RequestError(
            f"modes={arguments.modes}: chooses among the default cases, and a CASE was given; legal: {legal}"
        )
    if arguments.cases and arguments.deep:
        raise RequestError("deep: chooses more default cases, and a CASE was given; legal: --deep without a CASE")
    if arguments.subject == SUBJECT:
        check_modes(arguments.modes)


def _default_cases(arguments: argparse.Namespace, subject: NamedSubject) -> tuple[CaseLike, ...]:
    cases = default_cases(subject, arguments.modes, arguments.deep, _checkpoint_folder(arguments))
    if arguments.variant is not None:
        cases = tuple({case.mode: case for case in reversed(cases)}.values())[::-1]  # the first case of each mode
        cases = _as_variant(cases, arguments.variant, given=False)
    return with_data(cases, arguments.data)


def _checkpoint_folder(arguments: argparse.Namespace) -> str:
    """The folder that default cases save to; "" for dry ranks, which have no numbers, or if its name has a space."""
    folder = str(Path(arguments.out, "checkpoint-of-default-cases"))
    return "" if arguments.engine == "dry" or len(folder.split()) > 1 else folder


def default_cases(subject: NamedSubject, modes: str, deep: bool = False, checkpoint: str = "") -> tuple[CaseLike, ...]:
    """The default cases of a subject in the chosen modes ("all" or "a,b").

    These are the subject's own cases (`subject.cases`). If it has none, they are the stored cases, which have every
    pair of values of two words; or plain cases on 2 and 4 ranks, if the subject has no `refuses`. With `deep` they are
    every stored case in every mode. `checkpoint` is a folder to save to.
    """
    if not deep and (own := own_cases(subject)) is not None:
        modes_chosen = claims(subject).choose_modes(modes)
        return tuple(case for case in own if case.mode in modes_chosen)
    if not deep and not offers(subject.call, "refuses"):
        return tuple(case for mode in claims(subject).choose_modes(modes) for case in dense_model().plain_cases(mode))

    def refuses(case: CaseLike) -> str:
        try:
            return refusal(case, subject)
        except Unanswered:  # the run of this case asks again, and its verdict reports the error
            return ""

    return dense_model().default_cases(claims(subject).choose_modes(modes), refuses, deep=deep, checkpoint=checkpoint)


def _as_variant(cases: Iterable[CaseLike], name: str, *, given: bool) -> tuple[CaseLike, ...]:
    """Cases with this variant. A given case that cannot show it is an error; a default one is changed or left out."""
    try:
        made = dense_model().variant_words(name)
    except ValueError as problem:
        raise RequestError(str(problem)) from problem
    words = {"variant": name} if given else made
    shown = []
    for case in cases:
        try:
            shown.append(case.but(**words))
        except ValueError as problem:
            if given:
                raise RequestError(f"case {case_text(case)!r}: {problem}") from problem
    if not shown and not given:
        raise RequestError(f"variant={name}: no default case of these modes can show it; legal: --modes all")
    return tuple(shown)
