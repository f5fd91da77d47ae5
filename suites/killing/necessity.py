"""One test per collective of the subject under test: does any check fail when it is disturbed? (`pytest --faults`)

A collective is known from the ledger of an undisturbed run (`suites.killing.disturbed`). Every fault of it must be
killed by a check or proved equivalent; what is neither is redundant traffic or a blind spot, and fails.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from harness.engines.engine import Engine
from harness.engines.named import engine_named
from harness.errors import ProgramError
from harness.faults import Fault
from harness.protocols import CaseLike
from harness.subject import NamedSubject, refusal
from suites.killing.matrix import disturbed
from suites.mutants.rows import Killed, faults_killed


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One distinct collective of a case and its faults.

    Without any, `refused` says why the subject has none in this mode, `problem` why it is unknown.
    """

    mode: str
    case: CaseLike | None = None
    faults: tuple[Fault, ...] = ()
    refused: str = ""
    problem: str = ""

    def __str__(self) -> str:
        return f"{self.mode}-{self.faults[0].target}" if self.faults else self.mode


def collectives(
    subject: NamedSubject, modes: Sequence[str], *, quick: bool, only: CaseLike | None = None, timeout_s: float = 60.0
) -> Iterator[Collective]:
    """The collectives to disturb in these modes; with `only` those of this case. `quick` takes few faults of a mode.

    Every mode has a row at least. Raises RequestError when the subject is none.
    """
    with engine_named("inproc") as engine:
        for mode in modes:
            yield from _of_mode(subject, mode, engine, quick, only, timeout_s)


def _of_mode(
    subject: NamedSubject, mode: str, engine: Engine, quick: bool, only: CaseLike | None, timeout_s: float
) -> Iterator[Collective]:
    reason = refusal(only, subject) if only else ""
    if reason:
        yield Collective(mode=mode, refused=reason)
        return
    try:
        plans = disturbed(subject, mode, engine, quick=quick, only=only, timeout_s=timeout_s)
    except ProgramError as error:
        yield Collective(mode=mode, problem=f"the subject does not finish undisturbed:\n{error}")
        return
    if not any(plan.faults for plan in plans):
        yield Collective(mode=mode, refused=f"{subject} takes no case of mode={mode} or issues no collective there")
    for plan in plans:
        for _, faults in itertools.groupby(plan.faults, key=lambda fault: fault.target):
            yield Collective(mode=mode, case=plan.case, faults=tuple(faults))


@dataclass(frozen=True, slots=True, kw_only=True)
class Necessity:
    """Disturbs the collectives of one subject and finds whether a check notices."""

    subject: NamedSubject
    engine: Engine
    timeout_s: float = 60.0

    def missed(self, collective: Collective) -> str:
        """Which of its faults are neither killed nor proved equivalent, in six lines; "" when there is none."""
        if collective.case is None:
            return collective.problem
        rows = faults_killed(collective.case, collective.faults, self.subject, self.engine, self.timeout_s)
        wrong = [killed for killed in rows if killed.row.survived]
        return self._told(collective, wrong) if wrong else ""

    def _told(self, collective: Collective, wrong: Sequence[Killed]) -> str:
        target, suite = collective.faults[0].target, "pytest --pyargs suites.test_faults --faults"
        kinds = {killed.row.name.partition(":")[0].removesuffix(f" {target}"): killed for killed in wrong}
        said = [f"{kind} ({killed.told or killed.row.stands_for})" for kind, killed in kinds.items()]
        unmissed = next((killed.unmissed for killed in wrong if killed.unmissed), "")
        causes = unmissed or "no check depends on its data: a blind spot, or what is returned is not checked"
        lines = {
            "what": f"nobody notices that {target} is disturbed",
            "where": f"mode={collective.mode} phase={target.phase} module={target.region or 'none'} "
            f"call {target.calls[0][1]} of rank {target.calls[0][0]}",
            "error": f"{len(wrong)} of {len(collective.faults)} faults are neither killed nor proved equivalent",
            "first": ", ".join(said),
            "causes": causes,
            "repeat": f'{suite} --subject {self.subject.name} --case "{collective.case}"',
        }
        return "\n".join(f"{word + ':':<8}{text}" for word, text in lines.items())
