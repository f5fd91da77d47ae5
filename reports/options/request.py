"""Options of a command, checked before anything is loaded that takes long: torch, pandas.

`read_request` raises for a wrong word or value of any command. The request of `shardproof run` is `build_request`: all
that needs no torch is checked first; then the subject is imported, which mostly needs it. `Request` is a class of
`harness.running.request`.
"""

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import chdir, nullcontext
from importlib import import_module
from pathlib import Path

from shardproof.harness.dense_model import SUBJECT, check_modes, dense_model, in_own_words, parse_cases
from shardproof.harness.errors import RequestError
from shardproof.harness.interpreter import interrupted_after
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
from shardproof.reports.options.option_checks import (
    check_data,
    check_target,
    complete_experiment,
    profiled_steps,
    profiled_tools,
    with_data,
)
from shardproof.reports.options.others import check_options

LAUNCHED = "torchrun"
"""The engine of ranks that torchrun has launched: all run this command, and rank 0 alone does the work."""
REPEATED = 3
"""Of our own subject, every third default case is run twice: two runs cost more than what they find there."""
_OF_OUR_DECODER = ("variant", "data", "deep", "preset_experiment")
"""Options that need the case language of our decoder."""


def read_request(arguments: argparse.Namespace) -> Request | None:
    """The request of `shardproof run`; None for other commands, and on launched ranks, of which rank 0 reads it later.

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
    """Say on stderr where words without quotes look like one case and are several; rank 0 alone says it."""
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
    complete_experiment(arguments)
    seconds(arguments.timeout, "timeout")
    profiled_tools(arguments)
    _check_choice(arguments)
    if arguments.data is not None:
        check_data(arguments.data)


def _given_cases(arguments: argparse.Namespace, subject: NamedSubject | None = None) -> tuple[CaseLike, ...]:
    """The cases on the command line as this subject reads them; without one as cases of our decoder."""
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
    """The folder that default cases save to; "" where ranks have no numbers, or a case cannot name it."""
    folder = str(Path(arguments.out, "checkpoint-of-default-cases"))
    return "" if arguments.engine == "dry" or len(folder.split()) > 1 else folder


def default_cases(subject: NamedSubject, modes: str, deep: bool = False, checkpoint: str = "") -> tuple[CaseLike, ...]:
    """The default cases of a subject in the chosen modes ("all" or "a,b").

    They are its own (`subject.cases`); without any the stored ones, which hold every pair of values of two words. A
    subject without `refuses` gets plain cases on 2 and 4 ranks instead. `deep`: every stored case in every mode.
    `checkpoint` is a folder to save to.
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
