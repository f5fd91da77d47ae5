"""Failure messages word for word: six lines for every kind of failure, and the command that repeats it.

Additions of the line of the first place, and failures that share it as one block.
"""

from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from shardproof.harness.checking.checks import run_checks
from shardproof.harness.checking.records import Evidence
from shardproof.harness.diagnosing.diagnosis import diagnose_ended_case, explanation_of
from shardproof.harness.diagnosing.explained import failed_run, repeat_command
from shardproof.harness.errors import Desynchronised, Position, RankCrashed, RankDied, RankRaised, Stalled, TimeLimit
from shardproof.harness.running.store import Store
from shardproof.harness.verdicts.facts import First, state_text
from shardproof.harness.verdicts.verdict import Verdict
from shardproof.reports.stored import failures
from shardproof.reports.stored.failures import bugs_of_run, simplest_first
from shardproof.reports.stored.frames import load
from shardproof.suites.session.prover import Prover
from tests.harness.noted import failed
from tests.harness.toy_evidence import altered, case, events, evidence, outcome_of, planted, told_by, truth, without

W1 = "grad/layers.0.mlp.w1.weight"
SUBJECT = "my.module:subject"


def test_a_wrong_gradient_in_six_lines() -> None:
    seen = planted({W1: truth()[W1] * 2})
    peak = float(truth()[W1].abs().max() / truth()[W1].square().mean().sqrt())
    assert told_by(seen, "parameter_gradients") == [
        "what:   grad/layers.0.mlp.w1.weight differs from the dense model (check parameter_gradients)",
        "where:  mode=tp, all 2 ranks, step 0, phase backward, module layers.0.mlp.w1, "
        "tensor grad/layers.0.mlp.w1.weight",
        f"error:  peak error {peak:.3g} ({peak / 2**-52:.3g} eps), allowed 1e-09 (4.5e+06 eps); "
        "1 tensor of this check wrong",
        "first:  backward of layers.0.mlp.w1 in step 0: grad/layers.0.mlp.w1.weight",
        "causes: it is 2 x the truth; 2 is the number of micro-batches",
        'repeat: shardproof run "seq=16" --subject my.module:subject',
    ]


def test_a_missing_collective_in_six_lines() -> None:
    seen = evidence(events=without(events(), phase="forward", region="layers.0.mlp.w2"))
    assert told_by(seen, "ledger") == [
        "what:   missing event in forward of layers.0.mlp.w2 (1 call): all_reduce sum of 384 B float64 over tp "
        "(2 ranks) (check ledger)",
        "where:  mode=tp, all 2 ranks, phase forward, module layers.0.mlp.w2",
        "error:  1 event more or less than expected on a rank, allowed 0",
        "first:  forward of layers.0.mlp.w2: in the ledger: missing event in forward of layers.0.mlp.w2 (1 call): "
        "all_reduce sum of 384 B float64 over tp (2 ranks)",
        "causes: the all_reduce over tp is left out",
        'repeat: shardproof run "seq=16" --subject my.module:subject',
    ]


STOOD = [
    Position(rank=0, state="waits in", op="all_reduce", number=3, group="tp (0 1)", caller="model.py:7"),
    Position(rank=1, state="raised"),
]
SUBJECTS, MACHINES = "the subject did not finish", "the machine failed"
ENDED = "the process of a rank ended before the subject returned"
STALLS = "a rank came to no further call in time: the line above says where it stood"
SKIPS = "the ranks issued different calls, or not as many: the line above says where each stood"


@pytest.mark.parametrize(
    ("error", "what", "why", "cause"),
    [
        (RankRaised, SUBJECTS, "the subject raised: the line above says where each rank stood", "raised"),
        (partial(Desynchronised, kind="skipped"), SUBJECTS, SKIPS, "desynchronised"),
        (RankCrashed, SUBJECTS, ENDED, "raised"),
        (Stalled, SUBJECTS, STALLS, "desynchronised"),
        (TimeLimit, MACHINES, "the time was up", "machine"),
        (RankDied, MACHINES, "the machine failed", "machine"),
    ],
)
def test_a_case_without_an_outcome_in_six_lines(error: Any, what: str, why: str, cause: str) -> None:
    error = error("rank 1 ended", ranks=[1], positions=STOOD)
    failure = failed_run(case(), SUBJECT, error, "--engine pool")
    assert Verdict(
        case="", check="run", verdict="fail", facts=(state_text("rank 1 ended"),), failure=failure
    ).lines == [
        f"what:   {what}: rank 1 ended (check run)",
        "where:  mode=tp, rank 1 of 2",
        "error:  nothing to compare: there is no outcome",
        "first:  rank 0: waits in all_reduce #3 of tp (0 1), at model.py:7 | rank 1: raised",
        f"causes: {why}",
        'repeat: shardproof run "seq=16" --subject my.module:subject --engine pool',
    ]
    assert [told.id for told in diagnose_ended_case(error).causes] == [cause]


def test_every_failure_has_six_labelled_lines() -> None:
    seen = planted({name: tensor + 1 for name, tensor in truth().items()})
    failed = [name for name, finding in run_checks(seen).items() if finding.verdict == "fail"]
    assert len(failed) == 9
    for check in failed:
        labels = [line.split(":")[0] for line in told_by(seen, check)]
        assert labels == ["what", "where", "error", "first", "causes", "repeat"]
    silent = told_by(evidence(events=(), expectation=None), "parallelism")
    assert silent[2] == "error:  nothing to measure: this must never be"
    assert silent[4] == "causes: ranks of a case that splits send nothing, or hold everything, as the check states"


def test_the_rank_whose_shard_is_wrong_is_named() -> None:
    first, second = (outcome_of(rank, truth()) for rank in range(2))
    second[W1].local.mul_(3)
    lines = told_by(evidence(first, second), "parameter_gradients")
    assert lines[1].startswith("where:  mode=tp, rank 1 of 2, step 0")
    assert lines[3].endswith("wrong on tp rank 1 alone, right on tp rank 0")


def test_tensor_and_ledger_are_both_told_when_both_are_wrong() -> None:
    seen = planted({"loss/0": truth()["loss/0"] * 2}, events=altered(events(), 0, reduce_op="avg"))
    lines = told_by(seen, "forward")
    first = "first:  forward of embedding: loss/0; in the ledger: wrong event in forward of embedding"
    assert lines[3].startswith(first) and lines[3].endswith("at model.py:7")
    assert "the call is made otherwise: reduce_op avg instead of sum" in lines[4]


def test_the_repeat_command_survives_a_shell() -> None:
    assert repeat_command(case("mode=tp tp=2"), SUBJECT) == 'shardproof run "mode=tp" --subject my.module:subject'
    odd = repeat_command(case("mode=tp data=$HOME/a"), "a:b; rm")
    assert odd == "shardproof run 'data=$HOME/a' --subject 'a:b; rm'"


OF_BIAS, FIRST, SECOND = "grad/layers.0.mlp.w2.bias", "act/layers.0.mlp.w1", "act/layers.0.mlp.w2"


def beside(seen: Evidence) -> tuple[str, ...]:
    return explanation_of(seen, run_checks(seen)).first.beside


def wrong_on(ranks: Collection[int], text: str = "mode=tp tp=2 dp=2 seq=16", name: str = OF_BIAS) -> tuple[str, ...]:
    """Lines beside the first place when these of four ranks hold a whole tensor wrong, by 3 + its rank."""
    outcomes = [outcome_of(rank % 2, truth()) for rank in range(4)]
    for rank in ranks:
        outcomes[rank][name] = truth()[name] + 3 + rank
    return beside(evidence(*outcomes, case=case(text), events=(), expectation=None))


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ((1, 3), ("wrong on tp rank 1 alone, right on tp rank 0",)),
        ((2, 3), ("wrong on dp rank 1 alone, right on dp rank 0",)),
        ((3,), ("wrong on tp rank 1 of dp rank 1 alone, right on others",)),
        ((0, 3), ()),  # no coordinate tells them apart
        ((0, 1, 2, 3), ()),
    ],
)
def test_wrong_ranks_are_told_by_their_coordinates(ranks: tuple[int, ...], words: tuple[str, ...]) -> None:
    assert wrong_on(ranks) == words


def test_several_ranks_are_told_together_and_one_that_is_next_to_right_is_not_called_right() -> None:
    """Off by a millionth of what the other is off by, and still wrong."""
    assert wrong_on((1, 2, 3), "mode=tp tp=4 seq=16 heads=4") == ("wrong on tp ranks 1 2 3 alone, right on tp rank 0",)
    outcomes = [
        outcome_of(rank, {**truth(), OF_BIAS: truth()[OF_BIAS] + off}) for rank, off in enumerate((1e-4, 100.0))
    ]
    assert beside(evidence(*outcomes)) == ()


def after(*names: str) -> tuple[str, ...]:
    return beside(planted({name: truth()[name] + 1 for name in names}))


def test_code_between_two_linears_is_told_by_both() -> None:
    core = "the activation function, or w2 itself"
    assert after(SECOND) == (f"between w1, which is right, and w2 of layers.0.mlp: {core}",)
    back = "act_grad/layers.0.mlp.w1"
    assert after(back) == (f"between w2, which is right, and w1 of layers.0.mlp: {core}",)
    assert after(FIRST) == ()  # the first of them
    assert after("act/head") == ()  # what stands before it has no parent in common
    assert after("act_grad/layers.0.mlp.w2") == ()  # whoever uses what the last one returned


@pytest.mark.parametrize(
    ("first", "place"),
    [
        (First(phase="backward", region="layers.3.mlp.w1", step=0, name="act_grad/x"), "backward of layers.*.mlp.w1"),
        (First(phase="forward", region="embedding", name="act/embedding", event="missing"), "forward of embedding"),
        (First(phase="grad_sync", event="extra event in grad_sync of no module"), "grad_sync"),
        (First(phase="loss", step=1, name="loss/1"), "loss"),
        (First(), "run: loss/* differs"),
    ],
)
def test_what_failures_of_one_bug_share(first: First, place: str) -> None:
    assert failed("tp=2", "run", first).site == place


LOSS = First(phase="loss", step=0, name="loss/0")
HEAD = First(phase="backward", region="head", step=0, name="act_grad/head")


def inner(layer: int) -> First:
    return First(phase="forward", region=f"layers.{layer}", step=0, name=f"act/layers.{layer}")


def test_failures_are_grouped_by_first_place() -> None:
    records = [
        failed("mode=tp tp=2", "forward", HEAD),
        failed("mode=tp tp=2", "update", HEAD),
        failed("mode=msp tp=2", "forward", inner(1)),
        failed("mode=tp tp=4", "forward", HEAD),
        failed("mode=isp", "forward", inner(3)),
        Verdict(case="mode=isp", check="replicas", verdict="pass", facts=(state_text(""),)),
        Verdict(case="mode=isp", check="ledger", verdict="unknown", facts=(state_text("not decided"),)),
    ]
    first, second = bugs_of_run(records)
    assert first.verdict == records[0]
    assert first.follows == "also failing at this place: update (1 case), forward (1 more case)"
    assert second.follows == "also failing at this place: forward (1 more case)"
    named, _ = bugs_of_run([*records, failed("mode=tp tp=8", "update", HEAD)])
    assert named.follows == "also failing at this place: update (2 cases), forward (1 more case)"
    assert bugs_of_run(records[:1])[0].follows == ""


def test_the_simplest_case_is_shown_first(tmp_path: Path) -> None:
    cases = (
        ("mode=isp tp=2 dtype=bfloat16", "bfloat16", 2, 2, HEAD),
        ("mode=isp tp=8", "float64", 8, 2, inner(0)),
        ("mode=tp dtype=float32", "float32", 2, 2, HEAD),
        ("mode=tp tp=4", "float64", 4, 2, HEAD),
        ("mode=tp tp=4 steps=3", "float64", 4, 3, HEAD),
    )
    store = Store(tmp_path, "my:subject", {})
    names = ("case", "dtype", "world_size", "steps")
    store.plan({"mode": "tp", "micro": 2, **dict(zip(names, row[:-1], strict=True))} for row in cases)
    for words, *_, first in cases:
        store.add(words, "", (), (failed(words, "forward", first),), {})
    store.close()
    run = load(store.path)
    simplest = ["mode=tp tp=4", "mode=isp tp=8"]
    assert [bug.verdict.case for bug in bugs_of_run(simplest_first(run))] == simplest
    assert [
        group.verdict.case for group in failures.group_by_place(simplest_first(run), run.path, run.ledger)
    ] == simplest


def test_a_place_that_another_test_reported_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with Prover.on("shardproof.parallel.subject:subject", "2") as prover:

        def failing(test: str, *checks: str) -> str:
            monkeypatch.setenv("PYTEST_CURRENT_TEST", f"{test} (call)")
            return prover._report([failed("mode=tp", check, LOSS) for check in checks])

        whole = failing("test_a", "forward", "update")
        assert whole == failed("mode=tp", "forward", LOSS).message + "\nand from there on: update"
        assert failing("test_a", "forward", "update") == whole  # a case that is shrunk and run again is told in full
        assert failing("test_b", "ledger").splitlines() == [
            "ledger of mode=tp",
            "fails from the same first place on as test_a",
            "repeat: shardproof run",
        ]
