"""Proves the cases of a request one after another, in whatever process does: one engine, one dense model."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from harness.checking.evidence import FAIL, SKIP, Verdict
from harness.errors import RequestError
from harness.protocols import CaseLike, case_text
from harness.running.engines import engine_named
from harness.running.proof import prove
from harness.running.ranks.capacity import admit
from harness.running.ranks.output import shown_once
from harness.running.request import Request
from harness.running.result import CaseResult
from harness.running.trials.trial import Truths
from harness.torch_internals.memory import keep_freed_memory

REFUSED = "truth"
"""The check of a case that the dense model cannot compute, among others that it can."""


@contextmanager
def proving(request: Request, heard: Callable[[str], object] = str) -> Iterator[Callable[..., CaseResult]]:
    """Function that proves one case after another as the request demands, in every process.

    `heard` is called with their parts, further words are those of `prove`. A case of several that the dense model
    cannot compute, or this machine cannot hold, is skipped. A single one raises RequestError.
    """
    truths, second_opinion = Truths(), None
    keep_freed_memory()
    with engine_named(request.engine) as engine:

        def prove_case(case: CaseLike, **how: Any) -> CaseResult:
            nonlocal second_opinion
            usual: dict[str, Any] = {"device": request.device, "timeout_s": request.timeout_s, "heard": heard}
            usual |= {"options": request.options, "truths": truths}
            try:
                if len(request.cases) > 1:
                    admit([case], request.engine)
                with shown_once():
                    result = prove(case, request.subject, engine, **{**usual, **how})
                if how or result.verdict != FAIL:
                    return result
                from harness.running.shared_state import OnProcesses  # noqa: PLC0415

                second_opinion = second_opinion or OnProcesses(request)
                return second_opinion.of(result)
            except RequestError as problem:
                if len(request.cases) == 1 or how:
                    raise
                text, why = case_text(case), str(problem)
                skip = Verdict(case=text, check=REFUSED, verdict=SKIP, message=why)
                return CaseResult(case=case, text=text, verdicts=(skip,), skipped=why)

        yield prove_case
