"""Whether ranks failed because they are threads: the first failed case of a run again, on ranks that are processes.

Asked once a run, of a foreign subject whose modules keep state that a process has once (`keepers`), so neither right
runs nor other failures take longer. If the case passes there, which modules `per_rank` needs is found out in a fresh
process (`shared_modules`). Times are seconds.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

from harness.checking.evidence import FAIL
from harness.diagnosing.rules.causes import reported
from harness.engines.processes.forked.pool import PoolEngine
from harness.errors import ShardproofError
from harness.protocols import CaseLike
from harness.running.proof import CaseResult, prove
from harness.running.shared_modules import LOSS_PARALLEL, keepers, searching
from harness.subject import NamedSubject, kept_per_rank, offers

_LIMIT_S = 60.0
_OURS = "parallel"
_CAUSES = re.compile(r"^causes: .*$", re.MULTILINE)
_MAYBE = re.compile(r"; if --engine pool passes, ranks share state.*?(?=\n|$)")


class _Request(Protocol):
    """How the cases of a run are proved."""

    @property
    def engine(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def subject(self) -> NamedSubject: ...
    @property
    def timeout_s(self) -> float: ...


class OnProcesses:
    """The second opinion of a run: `of` looks at its results, and asks for the first that may fail for its threads."""

    def __init__(self, request: _Request) -> None:
        self._request = request
        self._asked = False

    def of(self, result: CaseResult) -> CaseResult:
        """The result; where the same case passes on processes, with that as its cause."""
        if self._asked or not self._may_share(result):
            return result
        self._asked = True
        subject, limit_s = self._request.subject, min(self._request.timeout_s, _LIMIT_S)
        with suppress(ShardproofError), searching(result.case, subject, limit_s=limit_s) as needed:
            if self._passes(result.case, limit_s):
                modules = needed()
                per_rank = (*kept_per_rank(subject.call), *modules) if modules else ()
                return _told(result, _legal(per_rank, LOSS_PARALLEL in _keepers(subject)))
        return result  # what cannot be found out leaves the failure as it is

    def _may_share(self, result: CaseResult) -> bool:
        """Whether a failed case of a foreign subject, on several threads, has modules that keep state."""
        asked, subject = self._request, self._request.subject
        if result.verdict != FAIL or result.machine or result.case.world_size == 1 or asked.engine != "inproc":
            return False
        return bool(subject.address) and subject.address.partition(".")[0] != _OURS and bool(_keepers(subject))

    def _passes(self, case: CaseLike, limit_s: float) -> bool:
        with PoolEngine() as pool:
            there = prove(case, self._request.subject, pool, device=self._request.device, timeout_s=limit_s)
        return there.evidence is not None and there.verdict != FAIL


def _keepers(subject: NamedSubject) -> tuple[str, ...]:
    """The modules that keep state; what a session enters for all ranks is none of theirs."""
    return tuple(
        name for name in keepers(subject.address) if name != LOSS_PARALLEL or not offers(subject.call, "session")
    )


def _legal(per_rank: tuple[str, ...], in_loss_parallel: bool) -> str:
    """What helps: the modules with which the case passed; a context that only a session can enter once; processes."""
    if per_rank:
        return f"subject.per_rank = {per_rank!r}, with which it passes here too"
    session = "subject.session = torch.distributed.tensor.parallel.loss_parallel in place of each rank's own, or "
    return f"{session if in_loss_parallel else ''}--engine pool"


def _told(result: CaseResult, legal: str) -> CaseResult:
    """The result with the cause that was found, before all others."""
    words = f"ranks share state here because they are threads: with --engine pool this case passes; legal: {legal}"
    verdicts = tuple(
        replace(one, message=_CAUSES.sub(lambda _: f"causes: {words}", _MAYBE.sub("", one.message)))
        if one.verdict == FAIL
        else one
        for one in result.verdicts
    )
    cause = reported("shared_state", words, words)
    diagnoses = {check: replace(told, causes=(cause, *told.causes)) for check, told in result.diagnoses.items()}
    return replace(result, verdicts=verdicts, diagnoses=diagnoses)
