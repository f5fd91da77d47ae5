"""`shardproof run` and `shardproof bench`: the request made of the options, and the result told.

Our own code enters here as names that the harness resolves, like anybody's. Without a CASE the request is
`default_cases`: every mode the subject claims, on 2 and 4 ranks, on real text.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from harness.cases import read_case
from harness.engines.processes.launched.torchrun import dismiss, serve, serves
from harness.errors import RequestError, ShardproofError
from harness.protocols import CaseLike, case_text
from harness.resolve import resolve
from harness.running.capacity import admit
from harness.running.run import Request, RunResult, run, seconds
from harness.subject import NamedSubject, Unanswered, claims, named, offers, refusal
from reports import experiment, page, summary, tables, witnesses
from reports.frames import Run, load
from reports.profiling import asked_steps, asked_tools
from reports.repro import check_target, write_script
from reports.show import show_failures
from reports.text import append_step_summary, show_message, show_table, ticking
from reports.unchecked import unchecked_notes

__all__ = ["bench_main", "default_cases", "main", "progress_text"]

INTERRUPTED = 130
LAUNCHED = "torchrun"
"""The engine whose ranks were launched with us: every one of them runs this command, and rank 0 alone does the work."""
FIRST_BATCH = "reference.batches:micro_batch"
VARIANT_WORDS = "reference.variants:words"
COVERING_CASES = "reference.covering:covering_cases"
PLAIN_CASES = "reference.covering:plain_cases"
BENCH = "bench.performance:main"
FAULT_TABLE = "bench.fault_table:main"


def main(arguments: argparse.Namespace) -> int:
    """Run, check, record, report. Exit status: 0 all pass, 1 a check failed, 2 nothing ran, 3 the machine failed.

    130 after a Ctrl-C: what was finished is reported, in the folder and on the screen.
    """
    if arguments.engine == LAUNCHED and serves():
        return serve()
    with chdir("."):  # a subject may go elsewhere; all paths are meant from here
        request = _asked(arguments)
        result = _run(request)
    result = dataclasses.replace(result, path=Path(arguments.out) / result.path.name)
    if arguments.emit_repro is not None and result.exit_status != INTERRUPTED:
        result = _with_script(result, request, arguments.emit_repro)
    _tell(result, as_json=arguments.json)
    if arguments.preset_experiment and not arguments.json and result.exit_status != INTERRUPTED:
        show_table(experiment.timeline(load(result.path), arguments.preset_experiment), sys.stdout)
        show_message(experiment.real_size(arguments.preset_experiment), sys.stdout)
    return result.exit_status


def _asked(arguments: argparse.Namespace) -> Request:
    """What the options ask for; launched ranks are sent home when it is refused."""
    try:
        return _request(arguments)
    except ShardproofError:
        if arguments.engine == LAUNCHED:
            dismiss()
        raise


def _run(request: Request) -> RunResult:
    latest = request.out / "latest"
    before = latest.resolve()
    try:
        with ticking(sys.stderr) as tick, _unhindered():
            return run(request, lambda done, total, case, verdict: tick(done, total, progress_text(case), verdict))
    except KeyboardInterrupt:
        if latest.resolve() == before:
            raise
        show_message("\nshardproof: interrupted; the cases finished before:", sys.stderr)
        return RunResult(path=latest.resolve(), verdicts=(), exit_status=INTERRUPTED, notes=())


def progress_text(case: CaseLike) -> str:
    """A case in a line of progress: its mode and number of ranks first, which its own text may leave out."""
    words = " ".join(word for word in case_text(case).split() if not word.startswith("mode="))
    return f"mode={case.mode} ranks={case.world_size} {words}".rstrip()


def _with_script(result: RunResult, request: Request, file: str) -> RunResult:
    """The result with a note on the script of --emit-repro; what hinders a script takes no verdict along."""
    try:
        with _unhindered():
            note = write_script(result, request, file)
    except ShardproofError as problem:
        note = str(problem)
    except KeyboardInterrupt:
        note = f"{file} was not written: interrupted"
        result = dataclasses.replace(result, exit_status=INTERRUPTED)
    except Exception as problem:
        note = f"{file} was not written: {type(problem).__name__}: {problem}"
    return dataclasses.replace(result, notes=(*result.notes, note))


def _request(arguments: argparse.Namespace) -> Request:
    """What the options ask for. Raises RequestError before anything runs."""
    out = Path(arguments.out).absolute()  # now: the import of a subject may change the folder too
    if arguments.emit_repro is not None:
        check_target(arguments.emit_repro)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise RequestError("device=cuda: this machine offers no CUDA device; legal: --device cpu")
    experiment.asked(arguments)
    subject = named(arguments.subject)
    timeout_s = seconds(arguments.timeout, "timeout")
    tools, cases = asked_tools(arguments), _cases(arguments, subject)
    return Request(
        cases=cases,
        subject=subject,
        engine=arguments.engine,
        device=arguments.device,
        out=out,
        timeout_s=timeout_s,
        command=tuple(sys.argv),
        page=_write_page,
        profile=tools,
        profile_steps=asked_steps(arguments, cases),
        processes=1 if arguments.cases else min(2, os.cpu_count() or 1),
    )


@contextmanager
def _unhindered() -> Iterator[None]:
    """One thread, for the ranks share it anyway, and on a busy machine further ones wait for each other in every small
    product; and collections that look through what is made from here on, not each time through all that is loaded.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        torch.set_num_threads(threads)


def bench_main(arguments: argparse.Namespace) -> int:
    """Measure and print the performance table, or another one; all live where everything meets."""
    measure: Any = resolve(FAULT_TABLE if arguments.faults else BENCH)
    return int(measure([] if arguments.out is None else ["--out", arguments.out]) or 0)


def _write_page(folder: Path) -> Path:
    return page.write(load(folder), folder / "report.html")


def _cases(arguments: argparse.Namespace, subject: NamedSubject) -> tuple[CaseLike, ...]:
    """All cases asked for, with readable data, before anything runs."""
    if arguments.cases and arguments.modes != "all":
        legal = "mode= in the case, or --modes without a CASE"
        raise RequestError(
            f"modes={arguments.modes}: chooses among the default cases, and a CASE was given; legal: {legal}"
        )
    if arguments.cases and arguments.deep:
        raise RequestError("deep: chooses more default cases, and a CASE was given; legal: --deep without a CASE")
    cases = _given(arguments.cases) or default_cases(subject, arguments.modes, deep=arguments.deep)
    if not arguments.cases and (unknown := claims(subject).unknown):
        left_out = f"{subject.name} claims {', '.join(unknown)}, which no case can have: left out"
        show_message(f"note: {left_out}", sys.stderr, style="yellow")
    if not (arguments.cases or arguments.deep or offers(subject.call, "refuses")):
        plain = f"{subject.name} has no refuses(case): default cases have plain words only; --deep has all words"
        show_message(f"note: {plain}", sys.stderr, style="yellow")
    if arguments.variant is not None and not arguments.cases:  # one case of a mode shows it, or none
        cases = tuple({case.mode: case for case in reversed(cases)}.values())[::-1]
    if arguments.variant is not None:
        cases = _as_variant(cases, arguments.variant, given=bool(arguments.cases))
    if arguments.data is not None:
        cases = tuple(_with_data(case, arguments.data) for case in cases)
    admit(cases, arguments.engine)
    _read_first(cases)
    return cases


def _given(cases: Iterable[str | CaseLike]) -> tuple[CaseLike, ...]:
    """The cases of the command; texts are those that the command line left to rank 0 of launched ranks."""
    return tuple(dict.fromkeys(read_case(case) if isinstance(case, str) else case for case in cases))


def default_cases(subject: NamedSubject, modes: str, *, deep: bool = False) -> tuple[CaseLike, ...]:
    """The cases that cover the words of the case language in the modes asked for ("all" or "a,b") and claimed.

    `deep`: every pair of values of two words; otherwise every pair that is no default. What the subject refuses is left
    out as far as it leaves anything. A subject without `refuses` has not said which words it knows: plain cases.
    """
    if not deep and not offers(subject.call, "refuses"):
        plain: Callable[[str], Iterable[CaseLike]] = resolve(PLAIN_CASES)  # type: ignore[assignment]
        return tuple(case for mode in claims(subject).chosen(modes) for case in plain(mode))
    cases_of: Callable[..., Iterable[CaseLike]] = resolve(COVERING_CASES)  # type: ignore[assignment]

    def refuses(case: CaseLike) -> str:
        try:
            return refusal(case, subject)
        except Unanswered:  # the case itself is to run into it: its verdict says so
            return ""

    return tuple(case for mode in claims(subject).chosen(modes) for case in cases_of(mode, refuses, deep=deep))


def _as_variant(cases: Iterable[CaseLike], name: str, *, given: bool) -> tuple[CaseLike, ...]:
    """The cases with this variant. One that was given must show it as it is; a default one is made to, or left out."""
    make: Callable[[str], dict[str, object]] = resolve(VARIANT_WORDS)  # type: ignore[assignment]
    try:
        words = {"variant": name} if given else make(name)
    except ValueError as problem:
        raise RequestError(str(problem)) from problem
    shown = []
    for case in cases:
        try:
            shown.append(case.but(**words))
        except ValueError as problem:
            if given:
                raise RequestError(f"case {case_text(case)!r}: {problem}") from problem
    if not shown:
        raise RequestError(f"variant={name}: no default case of these modes can show it; legal: --modes all")
    return tuple(shown)


def _with_data(case: CaseLike, path: str) -> CaseLike:
    try:
        return case.but(data=path)
    except ValueError as problem:
        raise RequestError(str(problem)) from problem


def _read_first(cases: Iterable[CaseLike]) -> None:
    """Read a first batch of every case: unreadable data are a wrong request and not a failure of the subject."""
    read: Callable[..., object] = resolve(FIRST_BATCH)  # type: ignore[assignment]
    for case in cases:
        try:
            read(case, 0, 0, 0)
        except (ValueError, OSError) as problem:
            raise RequestError(f"data={getattr(case, 'data', '')}: {problem}") from problem


def _tell(result: RunResult, *, as_json: bool) -> None:
    stored = load(result.path)
    rows = summary.headline(stored)
    if result.exit_status == INTERRUPTED:
        rows = rows[rows["case"].isin(stored.verdicts["case"])]
    notes = (*result.notes, *unchecked_notes(stored), *stored.notes)
    if len(rows):
        headline = tables.first_table(rows)
        append_step_summary(headline, str(result.path), os.environ)
    if as_json:
        print(json.dumps(_as_json(result, stored, rows, notes), indent=2, allow_nan=False))
        return
    if len(rows):
        show_table(headline, sys.stdout)
    for table in witnesses.tables(result.path):
        show_table(table, sys.stdout)
    show_failures(stored, sys.stdout)
    for note in notes:
        show_message(f"note: {note}", sys.stdout, style="yellow")
    page_words = "report.html opens offline; " if (result.path / "report.html").exists() else ""
    show_message(f"{result.path}  ({page_words}`shardproof show` prints all tables)", sys.stdout)


def _as_json(result: RunResult, stored: Run, rows: pd.DataFrame, notes: Sequence[str]) -> dict[str, object]:
    """The result for machines: exit status, folder, one object a case, every check that did not pass."""
    told = stored.verdicts[stored.verdicts["verdict"].isin(["fail", "unknown"])]
    return {
        "exit_status": result.exit_status,
        "run": str(result.path),
        "cases": _rows(rows),
        "failures": _rows(told[["case", "check", "verdict", "message"]]),
        "notes": list(notes),
    }


def _rows(frame: pd.DataFrame) -> list[dict[str, object]]:
    """The rows as JSON can hold them: what is not known is null, infinity is text."""
    known = frame.astype("object").where(frame.notna(), None)
    return [{str(key): _plain(value) for key, value in row.items()} for row in known.to_dict("records")]


def _plain(value: object) -> object:
    return str(value) if isinstance(value, float) and math.isinf(value) else value
