"""Every collective of unmodified Megatron-Core is proved necessary: its GPTModel needs each of its 4L + 5 calls."""

import pytest

pytest.importorskip("megatron.core", reason="needs the extra `peers`")

from harness.checking.evidence import PASS
from harness.engines.threads.inproc import InprocEngine
from harness.faults import faults_of
from harness.injecting.survey import survey, unproved
from harness.running.proof import prove
from harness.running.ranks.execution import execute
from harness.subject import case_of, named

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]
LAYERS = 1
SUBJECT = named("suites.subjects.megatron:subject")
CASE = case_of(f"tp=2 layers={LAYERS} micro=1", SUBJECT)


def test_gpt_model_equals_itself_on_one_rank(engine: InprocEngine) -> None:
    result = prove(CASE, SUBJECT, engine)
    assert result.verdict == PASS
    assert {"forward", "parameter_gradients", "replicas"} <= {verdict.check for verdict in result.verdicts}


def test_every_collective_is_necessary_and_every_doubled_sum_is_noticed(engine: InprocEngine) -> None:
    events = execute(CASE, SUBJECT.call, engine, text="").events
    faults = faults_of(events, CASE.axes, kinds=("drop", "double"))
    results = survey(CASE, SUBJECT, engine, faults=faults, first_only=True)
    dropped = [result for result in results if result.fault.kind == "drop"]
    assert len(dropped) == 4 * LAYERS + 5
    assert all(result.killed for result in dropped)
    assert unproved(results) == []
    equivalent = [str(result.fault) for result in results if result.equivalent]
    assert equivalent == ["double max all_reduce tp forward #0"]
    assert not [str(result.fault) for result in results if result.survived]
