"""Every collective of the subject is needed: whatever is done to its data, a check notices or a proof says why not.

Only with `--faults`; without it these tests are deselected. The profile says how many: `quick` a few of every mode,
the others all, those of further options too; `--case` all of that case.
"""

from collections.abc import Sequence

import pytest

from shardproof.harness.verdicts.words import label_lines
from shardproof.suites.killing import Collective
from shardproof.suites.mutants.kill_rows import Killed, faults_killed
from shardproof.suites.session.prover import Prover

pytestmark = [pytest.mark.inproc, pytest.mark.faults]


def test_a_disturbed_collective_is_noticed(prover: Prover, collective: Collective) -> None:
    if collective.refused:
        pytest.skip(collective.refused)
    if collective.case is None:
        pytest.fail(collective.problem, pytrace=False)
    rows = faults_killed(collective.case, collective.faults, prover.subject, prover.engine, prover.timeout_s)
    if missed := [killed for killed in rows if killed.row.survived]:
        pytest.fail(_six_lines(collective, missed, prover.subject.name), pytrace=False)


def _six_lines(collective: Collective, missed: Sequence[Killed], subject: str) -> str:
    """Which of its faults are neither killed nor proved equivalent."""
    target, suite = collective.faults[0].target, "pytest --pyargs shardproof.suites.test_faults --faults"
    kinds = {killed.row.name.partition(":")[0].removesuffix(f" {target}"): killed for killed in missed}
    unmissed = (killed.unmissed for killed in missed if killed.unmissed)
    lines = {
        "what": f"nobody notices that {target} is disturbed",
        "where": f"mode={collective.mode} phase={target.phase} module={target.region or 'none'} "
        f"call {target.calls[0][1]} of rank {target.calls[0][0]}",
        "error": f"{len(missed)} of {len(collective.faults)} faults are neither killed nor proved equivalent",
        "first": ", ".join(f"{kind} ({killed.diagnosed or killed.row.stands_for})" for kind, killed in kinds.items()),
        "causes": next(unmissed, "no check depends on its data: a blind spot, or what is returned is not checked"),
        "repeat": f'{suite} --subject {subject} --case "{collective.case}"',
    }
    return "\n".join(label_lines(lines))
