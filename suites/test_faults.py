"""Every collective of the subject is needed: whatever is done to its data, a check notices or a proof says why not.

Only with `--faults`; without it these tests are deselected. The profile says how many: `quick` a few of every mode,
the others all, those of further options too; `--case` all of that case.
"""

import pytest

from suites.killing.matrix import Collective
from suites.killing.necessity import Necessity
from suites.session.prover import Prover

pytestmark = [pytest.mark.inproc, pytest.mark.faults]


def test_a_disturbed_collective_is_noticed(prover: Prover, collective: Collective) -> None:
    if collective.refused:
        pytest.skip(collective.refused)
    missed = Necessity(subject=prover.subject, engine=prover.engine, timeout_s=prover.timeout_s).missed(collective)
    if missed:
        pytest.fail(missed, pytrace=False)
