"""Whether every collective of a subject is needed: its faults, in six lines where no check notices one."""

from collections.abc import Sequence
from dataclasses import dataclass

from harness.engines.engine import Engine
from harness.subject import NamedSubject
from suites.killing.matrix import Collective
from suites.mutants.kill_rows import Killed, faults_killed


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
        return self._report(collective, wrong) if wrong else ""

    def _report(self, collective: Collective, wrong: Sequence[Killed]) -> str:
        target, suite = collective.faults[0].target, "pytest --pyargs suites.test_faults --faults"
        kinds = {killed.row.name.partition(":")[0].removesuffix(f" {target}"): killed for killed in wrong}
        unmissed = (killed.unmissed for killed in wrong if killed.unmissed)
        lines = {
            "what": f"nobody notices that {target} is disturbed",
            "where": f"mode={collective.mode} phase={target.phase} module={target.region or 'none'} "
            f"call {target.calls[0][1]} of rank {target.calls[0][0]}",
            "error": f"{len(wrong)} of {len(collective.faults)} faults are neither killed nor proved equivalent",
            "first": ", ".join(
                f"{kind} ({killed.diagnosed or killed.row.stands_for})" for kind, killed in kinds.items()
            ),
            "causes": next(unmissed, "no check depends on its data: a blind spot, or what is returned is not checked"),
            "repeat": f'{suite} --subject {self.subject.name} --case "{collective.case}"',
        }
        return "\n".join(f"{word + ':':<8}{text}" for word, text in lines.items())
