"""Failure messages word for word: six lines for every kind of failure, and the command that repeats it."""

from functools import partial
from typing import Any

import pytest

from harness.checking.checks import examine
from harness.checking.evidence import Evidence
from harness.diagnosing.diagnosis import ended
from harness.diagnosing.failure_lines import repeat_command
from harness.diagnosing.six_lines import crash, explain
from harness.errors import Desynchronised, Position, RankCrashed, RankDied, RankRaised, TimeLimit
from tests.harness.toy_evidence import altered, case, events, evidence, outcome_of, planted, truth, without

W1 = "grad/layers.0.mlp.w1.weight"
SUBJECT = "my.module:subject"


def message(seen: Evidence, check: str) -> str:
    return explain(seen, examine(seen), check, SUBJECT)


def test_a_wrong_gradient_in_six_lines() -> None:
    seen = planted({W1: truth()[W1] * 2})
    peak = float(truth()[W1].abs().max() / truth()[W1].square().mean().sqrt())
    assert message(seen, "parameter_gradients") == "\n".join(
        [
            "what:   grad/layers.0.mlp.w1.weight differs from the dense model (check parameter_gradients)",
            "where:  mode=tp, all 2 ranks, step 0, phase backward, module layers.0.mlp.w1, "
            "tensor grad/layers.0.mlp.w1.weight",
            f"error:  peak error {peak:.3g} ({peak / 2**-52:.3g} eps), allowed 1e-09 (4.5e+06 eps); "
            "1 tensor of this check wrong",
            "first:  backward of layers.0.mlp.w1 in step 0: grad/layers.0.mlp.w1.weight",
            "causes: it is 2 x the truth, and micro=2: not divided by it, or multiplied once too often",
            'repeat: shardproof run "seq=16" --subject my.module:subject',
        ]
    )


def test_a_missing_collective_in_six_lines() -> None:
    seen = evidence(events=without(events(), phase="forward", region="layers.0.mlp.w2"))
    assert message(seen, "ledger") == "\n".join(
        [
            "what:   missing event in forward of layers.0.mlp.w2 (1 call): all_reduce sum of 384 B float64 over tp "
            "(2 ranks) (check ledger)",
            "where:  mode=tp, all 2 ranks, phase forward, module layers.0.mlp.w2",
            "error:  1 event more or less than expected on a rank, allowed 0",
            "first:  forward of layers.0.mlp.w2: in the ledger: missing event in forward of layers.0.mlp.w2 (1 call): "
            "all_reduce sum of 384 B float64 over tp (2 ranks)",
            "causes: the all_reduce over tp is left out: each rank keeps its partial sum",
            'repeat: shardproof run "seq=16" --subject my.module:subject',
        ]
    )


STOOD = [
    Position(rank=0, state="waits in", op="all_reduce", number=3, group="tp (0 1)", caller="model.py:7"),
    Position(rank=1, state="raised"),
]
SUBJECTS, MACHINES = "the subject did not finish", "the machine failed"
WAITS = "a rank that waits for ever, too little time, or a machine that failed"
ENDED = "the subject ended the process of a rank: a crash in native code, or os._exit"
SKIPS = "the ranks issued different calls, or not as many: the line above says where each stood"


@pytest.mark.parametrize(
    ("error", "what", "why", "cause"),
    [
        (RankRaised, SUBJECTS, "the subject raised: the line above says where each rank stood", "raised"),
        (partial(Desynchronised, kind="skipped"), SUBJECTS, SKIPS, "desynchronised"),
        (RankCrashed, SUBJECTS, ENDED, "crashed"),
        (TimeLimit, MACHINES, WAITS, "machine"),
        (RankDied, MACHINES, WAITS, "machine"),
    ],
)
def test_a_case_without_an_outcome_in_six_lines(error: Any, what: str, why: str, cause: str) -> None:
    error = error("rank 1 ended", ranks=[1], positions=STOOD)
    assert crash(case(), SUBJECT, error, "--engine pool") == "\n".join(
        [
            f"what:   {what}: rank 1 ended (check run)",
            "where:  mode=tp, 2 ranks",
            "error:  nothing to compare: there is no outcome",
            "first:  rank 0: waits in all_reduce #3 of tp (0 1), at model.py:7 | rank 1: raised",
            f"causes: {why}",
            'repeat: shardproof run "seq=16" --subject my.module:subject --engine pool',
        ]
    )
    assert [told.id for told in ended(error).causes] == [cause]


def test_every_failure_has_six_labelled_lines() -> None:
    seen = planted({name: tensor + 1 for name, tensor in truth().items()})
    findings = examine(seen)
    failed = [name for name, finding in findings.items() if finding.verdict == "fail"]
    assert len(failed) == 9
    for check in failed:
        labels = [line.split(":")[0] for line in explain(seen, findings, check, SUBJECT).splitlines()]
        assert labels == ["what", "where", "error", "first", "causes", "repeat"]
    silent = message(evidence(events=(), expectation=None), "parallelism").splitlines()
    assert silent[2] == "error:  nothing to measure: this must never be"
    assert silent[4] == "causes: the split was done to a tensor that is not used, or undone by what followed it"


def test_the_rank_whose_shard_is_wrong_is_named() -> None:
    first, second = (outcome_of(rank, truth()) for rank in range(2))
    second[W1].local.mul_(3)
    lines = message(evidence(first, second), "parameter_gradients").splitlines()
    assert lines[1].startswith("where:  mode=tp, rank 1 of 2, step 0")
    assert lines[4] == "causes: only part 1 of 2 over tp is wrong, and nearly all of it"


def test_tensor_and_ledger_are_both_told_when_both_are_wrong() -> None:
    seen = planted({"loss/0": truth()["loss/0"] * 2}, events=altered(events(), 0, reduce_op="avg"))
    lines = message(seen, "forward").splitlines()
    first = "first:  forward of embedding: loss/0; in the ledger: wrong event in forward of embedding"
    assert lines[3].startswith(first) and lines[3].endswith("at model.py:7")
    assert "averaged over tp where it must be summed: reduce_op avg instead of sum" in lines[4]


def test_the_repeat_command_survives_a_shell() -> None:
    assert repeat_command(case("mode=tp tp=2"), SUBJECT) == 'shardproof run "mode=tp" --subject my.module:subject'
    odd = repeat_command(case("mode=tp data=$HOME/a"), "a:b; rm")
    assert odd == "shardproof run 'data=$HOME/a' --subject 'a:b; rm'"
