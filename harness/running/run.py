"""The cases of a request: each is proved and stored as it finishes. `shardproof run` calls `run_request`.

    subject = resolve_subject("shardproof.parallel.subject:subject")
    result = run_request(Request(cases=cases_of(["mode=tp tp=2"], subject), subject=subject))

Exit status: 1 a check failed or could not be decided, 3 the machine failed and nothing else did. 2: the request was
wrong (RequestError, or the dense model cannot compute one of the cases) or every case was skipped. Otherwise 0.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from shardproof.harness.dense_model import in_own_words
from shardproof.harness.errors import RequestError, ShardproofError
from shardproof.harness.interpreter import interrupted_after
from shardproof.harness.mesh_axes import stage_count
from shardproof.harness.protocols import CaseLike, case_text
from shardproof.harness.running.engines import engine_named
from shardproof.harness.running.forked_process import fork_worker
from shardproof.harness.running.proof import ended_by, prove
from shardproof.harness.running.ranks.capacity import admit, select_admitted_cases
from shardproof.harness.running.ranks.output import shown_once
from shardproof.harness.running.request import Request, check_saved
from shardproof.harness.running.result import REFUSED, CaseResult, StoredCase, stored_part
from shardproof.harness.running.run_result import Kept, Progress, RunResult, run_result
from shardproof.harness.running.sharing import ProvingProcess, Sharing, serve, together
from shardproof.harness.running.store import Store, environment
from shardproof.harness.running.trials.trial import EXPLAINING, Truths
from shardproof.harness.subject import NamedSubject, Unanswered, ask_subject, claimed_modes, compared_with, truth_of
from shardproof.harness.verdicts.facts import state_text
from shardproof.harness.verdicts.verdict import FAIL, SKIP, Verdict

if TYPE_CHECKING:
    from shardproof.harness.running.sharing import ProvingProcess
    from shardproof.harness.running.witnessing import Witnesses


def run_request(
    request: Request, on_progress: Progress = lambda *_: None, meanwhile: Callable[[], object] = lambda: None
) -> RunResult:
    """Prove every case and write the run folder as it goes; finished cases stay readable whatever stops the run.

    `meanwhile` is called once, while forked processes prove the first cases: the command loads its reports there.
    Raises RequestError before anything runs: without a case, if all are too large for this machine, or for a wrong
    claim of the subject, engine or folder. If the dense model cannot compute one of several cases, that case is
    skipped: its loss diverges, its data are unreadable, or it has too little memory.
    """
    cases, subject = request.cases, request.subject
    if not cases:
        raise RequestError("cases=(): at least one case is needed; legal: mode=tp tp=2")
    check_saved(cases)
    select_admitted_cases(cases, request.engine)
    claimed_modes(subject)
    notes: list[str] = []
    witnesses: Witnesses | None = None
    amended: Mapping[str, tuple[Verdict, ...]] = {}
    about: dict[str, object] = {"subject": subject.name, "engine": request.engine, "device": request.device}
    about |= {"timeout_s": request.timeout_s, "truth": compared_with(truth_of(subject)), "cases": len(cases)}
    planned = [_plan_row(case, subject) for case in cases]
    by_text = {case_text(case): case for case in cases}
    # Either forked processes prove the cases, or this process does, which then has `prove_case`.
    with _processes(request) as forked, nullcontext() if forked else open_prover(request) as prove_case:
        store = Store(request.out, subject.name, environment(request.command, about))
        kept = Kept(store=store, cases=by_text, total=len(cases), on_progress=on_progress, fail_fast=request.fail_fast)
        try:
            store.plan(planned)
            if request.profile:
                from shardproof.harness.running.witnessing import witnesses_of  # noqa: PLC0415  (`--profile` alone)

                witnesses = witnesses_of(request, store.path / "traces")
            if prove_case is None:
                notes += _prove_in_processes(request, forked, kept, meanwhile)
            else:
                for case in cases:
                    result = prove_case(case)
                    stored = stored_part(witnesses.add_witness_verdict(result, subject, store) if witnesses else result)
                    with interrupted_after():
                        if not kept.keep(stored):
                            break
            if failed := [result for result in kept.results if result.verdict == FAIL]:
                from shardproof.harness.running.experiments import Failed, look_for_words  # noqa: PLC0415  (few runs fail)

                failures = [
                    Failed(
                        case=by_text[result.text],
                        verdicts=result.verdicts,
                        explained_s=sum(result.seconds.get(part, 0.0) for part in EXPLAINING),
                    )
                    for result in failed
                ]
                amended = look_for_words(failures, request, open_prover, store, apart=prove_case is None)
        finally:
            store.close()
    return run_result(request, store, kept.results, amended, witnesses.notes if witnesses else (), notes)


@contextmanager
def open_prover(request: Request, heard: Callable[[str], object] = str) -> Iterator[Callable[..., CaseResult]]:
    """A function that proves one case after another as requested, with one engine and one dense model for all.

    `heard` is called with the parts of a case as they begin; further words are those of `prove`. One of several cases
    is skipped if the dense model cannot compute it or this machine cannot hold it. A single one raises RequestError.
    """
    truths = Truths()
    with engine_named(request.engine) as engine:

        def prove_case(case: CaseLike, **how: Any) -> CaseResult:  # only experiments pass `how`
            usual: dict[str, Any] = {"device": request.device, "timeout_s": request.timeout_s, "heard": heard}
            usual |= {"options": request.options, "truths": truths, "repeat": request.repeats(case)}
            try:
                if len(request.cases) > 1:
                    admit([case], request.engine)
                with shown_once():
                    return prove(case, request.subject, engine, **{**usual, **how})
            except RequestError as problem:
                if len(request.cases) == 1 or how:
                    raise
                text, why = case_text(case), str(problem)
                skip = Verdict(case=text, check=REFUSED, verdict=SKIP, facts=(state_text(why),))
                return CaseResult(case=case, text=text, verdicts=(skip,), skipped=why)

        yield prove_case


def _prove_in_processes(
    request: Request, processes: "list[ProvingProcess]", kept: Kept, meanwhile: Callable[[], object]
) -> list[str]:
    """Prove all cases in these processes; returns notes on processes that crashed."""
    cases, name = request.cases, request.subject.name

    def store_ended_case(number: int, error: ShardproofError) -> StoredCase:
        return stored_part(ended_by(cases[number], name, error, request.options))

    start = partial(_start_process, request)
    sharing = Sharing(cases=cases, processes=processes, keep=kept.keep, ended=store_ended_case, start=start)
    sharing.prove_all(together(cases), meanwhile)
    return sharing.notes


@contextmanager
def _processes(request: Request) -> "Iterator[list[ProvingProcess]]":
    """Forked processes for a request: at most `processes` of it for ranks as threads, else at most one.

    The list is empty for torchrun, for profiles, and if this process cannot be forked: then it proves the cases itself.
    """
    forks = 0 if request.engine == "torchrun" or request.profile else request.processes
    ours: list[ProvingProcess] = []
    try:
        for _ in range(forks if request.engine == "inproc" else min(forks, 1)):
            process = _start_process(request)
            ours += [process] if process else []
        yield ours
    finally:
        for process in ours:  # all connections first: a later fork inherits those of earlier ones
            process.worker.pipe.close()
        for process in ours:
            process.close()


def _start_process(request: Request) -> "ProvingProcess | None":
    worker = fork_worker(lambda connection: serve(connection, request, open_prover))
    return None if worker is None else ProvingProcess(worker, request)


def _plan_row(case: CaseLike, subject: NamedSubject) -> dict[str, object]:
    """The row of `cases.jsonl`: the text, and what reports need of it without parsing; of a pipeline its bubble too."""
    row: dict[str, object] = {"case": case_text(case), "mode": case.mode, "world_size": case.world_size}
    row |= {"dtype": case.dtype, "micro": case.micro, "steps": case.steps}
    row |= {"words": case.words()} if in_own_words(case) else {}  # only the subject can read its text
    if stage_count(case.axes) > 1:
        with suppress(Unanswered), ask_subject("pipeline"):  # needed by pages alone
            pipeline = getattr(subject.call, "pipeline", None)
            stated = None if pipeline is None else pipeline(case).bubble_stated
            row |= {} if stated is None else {"bubble_stated": float(stated)}
    tokens = getattr(case, "tokens", None)
    return row if tokens is None else {**row, "tokens": tokens}
