"""`shardproof run` and `shardproof bench`: the request made of the options, and the result told.

Our own code enters here as names that the harness resolves, like anybody's. Without a CASE the request is `PLAN`:
every mode the subject claims, on 2 and 4 ranks, on real text.
"""

from __future__ import annotations

import argparse
import dataclasses
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

from harness.capacity import admit
from harness.claims import claims
from harness.diagnosis import case_text
from harness.engines.torchrun import dismiss, serve, serves
from harness.errors import RequestError, ShardproofError
from harness.protocols import CaseLike
from harness.resolve import resolve
from harness.run import Request, RunResult, parse_cases, run
from reports import experiment, page, summary, tables, witnesses
from reports.frames import Run, load
from reports.profiling import asked_steps, asked_tools
from reports.repro import check_target, write_script
from reports.show import show_failures, unreturned
from reports.text import append_step_summary, show_message, show_table, ticking

__all__ = ["PLAN", "bench_main", "default_cases", "main"]

LAUNCHED = "torchrun"
"""The engine whose ranks were launched with us: every one of them runs this command, and rank 0 alone does the work."""
FIRST_BATCH = "reference.batches:micro_batch"
VARIANT_WORDS = "reference.variants:words"
BENCH = "suites.bench:main"
FAULT_TABLE = "suites.fault_table:main"
COST_TABLE = "suites.cost_table:main"

_MEGATRON = ("mode={mode} tp=2", "mode={mode} tp=4 kv_heads=4", "mode={mode} tp=2 dp=2")
_INTERNEVO = tuple(f"preset=tiny-internlm2 {words}" for words in _MEGATRON)
_WEIGHTS_APART = ("preset=tiny-internlm2 mode={mode} tp=4 wp=2", "preset=tiny-internlm2 mode={mode} tp=2 dp=2 wp=4")
PLAN = {
    "tp": _MEGATRON,
    "tp-sp": _MEGATRON,
    "mtp": _INTERNEVO,
    "msp": _INTERNEVO,
    "fsp": _INTERNEVO,
    "isp": (*_INTERNEVO, *_WEIGHTS_APART),
}
"""Mode -> the cases that run when none is given. Two and four ranks; `isp` also with unequal axes."""


def main(arguments: argparse.Namespace) -> int:
    """Run, check, record, report. Exit status: 0 all pass, 1 a check failed, 2 nothing ran, 3 the machine failed."""
    if arguments.engine == LAUNCHED and serves():
        return serve()
    with chdir("."):  # a subject may go elsewhere; all paths are meant from here
        result = _run(arguments)
    result = dataclasses.replace(result, path=Path(arguments.out) / result.path.name)
    if arguments.emit_repro is not None:
        result = _with_script(result, arguments)
    _tell(result, as_json=arguments.json)
    if arguments.preset_experiment and not arguments.json:
        show_table(experiment.timeline(load(result.path), arguments.preset_experiment), sys.stdout)
        show_message(experiment.real_size(arguments.preset_experiment), sys.stdout)
    return result.exit_status


def _run(arguments: argparse.Namespace) -> RunResult:
    try:
        request = _request(arguments)
    except ShardproofError:
        if arguments.engine == LAUNCHED:
            dismiss()
        raise
    latest = request.out / "latest"
    before = latest.resolve()
    try:
        with ticking(sys.stderr) as tick, _one_thread():
            return run(request, tick)
    except KeyboardInterrupt:
        if latest.resolve() != before:
            shown = Path(arguments.out) / "latest"
            show_message(f"\nfinished cases are in {latest.resolve()}: shardproof show {shown}", sys.stderr)
        raise


def _with_script(result: RunResult, arguments: argparse.Namespace) -> RunResult:
    """The result with a note on the script of --emit-repro; what hinders a script takes no verdict along."""
    try:
        with _one_thread():
            note = write_script(result, arguments.subject, arguments.emit_repro)
    except ShardproofError as problem:
        note = str(problem)
    except Exception as problem:
        note = f"{arguments.emit_repro} was not written: {type(problem).__name__}: {problem}"
    return dataclasses.replace(result, notes=(*result.notes, note))


def _request(arguments: argparse.Namespace) -> Request:
    """What the options ask for. Raises RequestError before anything runs."""
    out = Path(arguments.out).absolute()  # now: the import of a subject may change the folder too
    if arguments.emit_repro is not None:
        check_target(arguments.emit_repro)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise RequestError("device=cuda: this machine offers no CUDA device; legal: --device cpu")
    experiment.asked(arguments)
    resolve(arguments.subject)
    tools, cases = asked_tools(arguments), _cases(arguments)
    return Request(
        cases=cases,
        subject=arguments.subject,
        engine=arguments.engine,
        device=arguments.device,
        out=out,
        command=tuple(sys.argv),
        page=_write_page,
        profile=tools,
        profile_steps=asked_steps(arguments, cases),
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    """The ranks share one thread anyway; on a busy machine further ones wait for each other in every small product."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def bench_main(arguments: argparse.Namespace) -> int:
    """Measure and print the performance table, or another one; all live where everything meets."""
    measure: Any = resolve(FAULT_TABLE if arguments.faults else COST_TABLE if arguments.costs else BENCH)
    return int(measure([] if arguments.out is None else ["--out", arguments.out]) or 0)


def _write_page(folder: Path) -> Path:
    return page.write(load(folder), folder / "report.html")


def _cases(arguments: argparse.Namespace) -> tuple[str, ...]:
    """The texts of all cases asked for, valid and with readable data, before anything runs."""
    if arguments.cases and arguments.modes != "all":
        legal = "mode= in the case, or --modes without a CASE"
        raise RequestError(
            f"modes={arguments.modes}: chooses among the default cases, and a CASE was given; legal: {legal}"
        )
    texts = tuple(arguments.cases) or default_cases(arguments.subject, arguments.modes)
    if not arguments.cases and (unknown := claims(arguments.subject).unknown):
        left_out = f"{arguments.subject} claims {', '.join(unknown)}, which no case can have: left out"
        show_message(f"note: {left_out}", sys.stderr, style="yellow")
    cases = parse_cases(texts)
    if arguments.variant is not None:
        cases = _as_variant(cases, arguments.variant, given=bool(arguments.cases))
    if arguments.data is not None:
        cases = [_with_data(case, arguments.data) for case in cases]
    admit(cases, arguments.engine)
    _read_first(cases)
    return tuple(case_text(case) for case in cases)


def default_cases(subject: str, modes: str) -> tuple[str, ...]:
    """The cases of PLAN in the modes that are asked for ("all" or "a,b") and claimed by the subject."""
    asked = claims(subject).chosen(modes)
    return tuple(text.format(mode=mode) for mode in asked for text in PLAN.get(mode, _MEGATRON))


def _as_variant(cases: Iterable[CaseLike], name: str, *, given: bool) -> list[CaseLike]:
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
    return shown


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
    headline = tables.headline_table(summary.headline(stored))
    append_step_summary(headline, str(result.path), os.environ)
    notes = (*result.notes, *unreturned(stored), *stored.notes)
    if as_json:
        print(json.dumps(_as_json(result, stored, notes), indent=2, allow_nan=False))
        return
    show_table(headline, sys.stdout)
    for table in witnesses.tables(result.path):
        show_table(table, sys.stdout)
    show_failures(stored, sys.stdout)
    for note in notes:
        show_message(f"note: {note}", sys.stdout, style="yellow")
    show_message(f"{result.path}  (report.html opens offline; `shardproof show` prints all tables)", sys.stdout)


def _as_json(result: RunResult, stored: Run, notes: Sequence[str]) -> dict[str, object]:
    """The result for machines: exit status, folder, one object a case, every check that did not pass."""
    headline = summary.headline(stored)
    told = stored.verdicts[stored.verdicts["verdict"].isin(["fail", "unknown"])]
    return {
        "exit_status": result.exit_status,
        "run": str(result.path),
        "cases": _rows(headline),
        "failures": _rows(told[["case", "check", "verdict", "message"]]),
        "notes": list(notes),
    }


def _rows(frame: pd.DataFrame) -> list[dict[str, object]]:
    """The rows as JSON can hold them: what is not known is null, infinity is text."""
    known = frame.astype("object").where(frame.notna(), None)
    return [{str(key): _plain(value) for key, value in row.items()} for row in known.to_dict("records")]


def _plain(value: object) -> object:
    return str(value) if isinstance(value, float) and math.isinf(value) else value
