"""`shardproof run` and `shardproof bench`: a request (reports.options.request) run, its result shown.

Our own code enters here as names that the harness resolves, as any other subject does. Code that shows a result loads
pandas, and is imported while another process proves the first cases.
"""

import argparse
import dataclasses
import gc
import sys
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from shardproof.harness.errors import MachineError, RequestError, ShardproofError
from shardproof.harness.interpreter import COLLECTED_AFTER, ended_as_interrupted, interrupted_after
from shardproof.harness.protocols import CaseLike, case_text
from shardproof.harness.resolve import resolve
from shardproof.harness.running.forked_process import forkable
from shardproof.harness.running.request import Request
from shardproof.harness.running.run import run_request
from shardproof.harness.running.run_result import INTERRUPTED, RunResult
from shardproof.harness.running.sharing import arrange_cases
from shardproof.harness.subject import NamedSubject, claims, offers, own_cases
from shardproof.harness.verdicts.verdict import FAIL
from shardproof.reports.options.request import build_request
from shardproof.reports.printing.text import show_message, show_note, show_progress

if TYPE_CHECKING:
    from shardproof.reports.stored.frames import Run

BENCH = "bench.performance:main"
CHECKOUT = Path(__file__).resolve().parents[2]
"""The folder of the repository, where `bench` lies beside the installed folders."""


def main(arguments: argparse.Namespace) -> int:
    """Run, check, record, report. Exit status: 0 all pass, 1 a check failed or could
    not be decided, 2 nothing ran, 3 the machine failed.

    130 after a Ctrl-C or a SIGTERM: what was finished is reported, in the folder and on the screen. Of launched ranks,
    rank 0 alone does this; the others serve it, and are released when it refuses the request.
    """
    request: Request | None = arguments.request
    if request is None:  # of launched ranks, the first reads it, and releases the others when it is refused
        from shardproof.harness.engines.processes.launched import torchrun  # noqa: PLC0415  (few runs are launched)

        if torchrun.is_to_serve():
            return torchrun.serve_driver()
        try:
            request = build_request(arguments)
        except ShardproofError:
            torchrun.dismiss_world()
            raise
    if not arguments.cases:
        request = dataclasses.replace(request, cases=arrange_cases(request.cases))
        for note in _notes_on_defaults(request.subject, deep=arguments.deep):
            show_note(note, sys.stderr)
    with chdir("."):  # a subject may go elsewhere; all paths are meant from here
        result, stored = _run_request(request)
    result = dataclasses.replace(result, path=Path(arguments.out) / result.path.name)
    if arguments.emit_repro is not None:
        from shardproof.reports.commands.repro import with_script  # noqa: PLC0415  (imports DTensor: half a second)

        with _run_unhindered():
            result = with_script(result, request, arguments.emit_repro)
    interrupted = result.exit_status == INTERRUPTED
    _reports().show_result(result, stored, as_json=arguments.json, interrupted=interrupted)
    return result.exit_status


def _notes_on_defaults(subject: NamedSubject, *, deep: bool) -> Iterator[str]:
    """Notes on cases that the default cases of this subject leave out."""
    if unknown := claims(subject).unknown:
        yield f"{subject.name} claims {', '.join(unknown)}, which no case can have: left out"
    if not deep and own_cases(subject) is None and not offers(subject.call, "refuses"):
        yield f"{subject.name} has no refuses(case): default cases have plain words only; --deep has all words"


def _run_request(request: Request) -> "tuple[RunResult, Run]":
    """The result of a request and its run folder as it was read, with its page in it.

    After a Ctrl-C or a failure of the machine it is that of the cases finished before, without a page. The exception
    is raised again if there is no run folder, or if the machine failed before any case was finished.
    """
    if request.processes:
        request = request if forkable(request.device) else dataclasses.replace(request, processes=0)
    latest = request.out / "latest"
    before = latest.resolve()
    try:
        with ended_as_interrupted(), show_progress(sys.stderr) as tick, _run_unhindered():
            result = run_request(
                request,
                lambda done, total, case, verdict: tick(done, total, progress_text(case), verdict),
                meanwhile=_load_reports,
            )
            stored, note = _load_reports().load_with_page(result.path.resolve())
            return dataclasses.replace(result, notes=(*result.notes, *filter(None, [note]))), stored
    except (KeyboardInterrupt, MachineError) as end:
        if latest.resolve() == before:
            raise
        stored = _load_reports().load(latest.resolve())
        interrupted = isinstance(end, KeyboardInterrupt)
        if not interrupted and stored.verdicts.empty:
            raise
        why = "interrupted" if interrupted else str(end)
        show_message(f"\nshardproof: {why}; the cases finished before:", sys.stderr)
        failed = (stored.verdicts["verdict"] == FAIL).any()  # outweighs a failure of the machine
        status = INTERRUPTED if interrupted else 1 if failed else MachineError.exit_status
        return RunResult(path=stored.path, verdicts=(), exit_status=status, notes=()), stored


def _reports() -> ModuleType:
    """What shows a result, `reports.commands.result`."""
    from shardproof.reports.commands import result  # noqa: PLC0415  (pandas)

    return result


def _load_reports() -> ModuleType:
    with interrupted_after():  # numpy and pandas, once interrupted, cannot be imported again
        loaded = _reports()
    gc.freeze()  # it all stays
    return loaded


def progress_text(case: CaseLike) -> str:
    """A case in a line of progress: its mode and number of ranks first, which its own text may leave out."""
    words = " ".join(word for word in case_text(case).split() if not word.startswith("mode="))
    return f"mode={case.mode} ranks={case.world_size} {words}".rstrip()


@contextmanager
def _run_unhindered() -> Iterator[None]:
    """Run with one thread and fewer collections.

    The ranks share the thread anyway, and on a busy machine further threads wait for each other in every small
    operation. Garbage collection looks through what is made from here on, and not through all that is loaded.
    """
    threads, thresholds = torch.get_num_threads(), gc.get_threshold()
    torch.set_num_threads(1)
    gc.freeze()
    gc.set_threshold(*COLLECTED_AFTER)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
        torch.set_num_threads(threads)


def bench_main(arguments: argparse.Namespace) -> int:
    """Measure and print the performance table, by a script of the repository.

    Raises RequestError where this is no checkout: a wheel does not hold it.
    """
    if not (CHECKOUT / "bench" / "performance.py").is_file():
        raise RequestError(
            "bench: its script is in the repository, not in a wheel; legal: in a checkout, `pip install -e .`"
        )
    sys.path.insert(0, str(CHECKOUT))  # before a folder `bench` of the user
    measure: Any = resolve(BENCH)
    words = [] if arguments.out is None else ["--out", arguments.out]
    return int(measure([*words, "--quick"] if arguments.quick else words) or 0)
