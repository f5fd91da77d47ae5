"""Additions of the first place's line, and failures that share it as one block."""

from collections.abc import Collection
from pathlib import Path

import pandas as pd
import pytest

from harness.checking.checks import examine
from harness.checking.evidence import Evidence, Verdict
from harness.diagnosing.diagnosis import explanation_of
from harness.diagnosing.failure_lines import site
from harness.running.store import Store
from reports.stored import failures
from reports.stored.failures import bugs, simplest_first
from reports.stored.frames import load
from suites.session.prover import Prover
from tests.harness.toy_evidence import case, evidence, outcome_of, planted, truth

BIAS, W1, W2 = "grad/layers.0.mlp.w2.bias", "act/layers.0.mlp.w1", "act/layers.0.mlp.w2"


def beside(seen: Evidence) -> tuple[str, ...]:
    return explanation_of(seen, examine(seen)).first.beside


def wrong_on(ranks: Collection[int], text: str = "mode=tp tp=2 dp=2 seq=16", name: str = BIAS) -> tuple[str, ...]:
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
    outcomes = [outcome_of(rank, {**truth(), BIAS: truth()[BIAS] + off}) for rank, off in enumerate((1e-4, 100.0))]
    assert beside(evidence(*outcomes)) == ()


def after(*names: str) -> tuple[str, ...]:
    return beside(planted({name: truth()[name] + 1 for name in names}))


def test_code_between_two_linears_is_told_by_both() -> None:
    core = "the activation function, or w2 itself"
    assert after(W2) == (f"between w1, which is right, and w2 of layers.0.mlp: {core}",)
    back = "act_grad/layers.0.mlp.w1"
    assert after(back) == (f"between w2, which is right, and w1 of layers.0.mlp: {core}",)
    assert after(W1) == ()  # the first of them
    assert after("act/head") == ()  # what stands before it has no parent in common
    assert after("act_grad/layers.0.mlp.w2") == ()  # whoever uses what the last one returned


def six(first: str, check: str = "forward", what: str = "loss/0 differs") -> str:
    lines = (f"what:   {what} (check {check})", f"first:  {first}", "causes: -", "repeat: shardproof run")
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("first", "place"),
    [
        ("backward of layers.3.mlp.w1 in step 0: act_grad/layers.3.mlp.w1", "backward of layers.*.mlp.w1"),
        ("forward of embedding in step 0: act/embedding; in the ledger: missing event", "forward of embedding"),
        ("grad_sync: in the ledger: extra event in grad_sync of no module (1 call)", "grad_sync"),
        ("loss in step 1: loss/1", "loss"),
        ("rank 1 raised ValueError at x.py:7", "rank * raised ValueError (check run)"),
    ],
)
def test_what_failures_of_one_bug_share(first: str, place: str) -> None:
    assert site(six(first, check="run", what="rank 1 raised ValueError")) == place


def test_failures_are_grouped_by_first_place() -> None:
    head, inner = "backward of head in step 0: act_grad/head", "forward of layers.{} in step 0: act/layers.{}"
    rows = [
        ("mode=tp tp=2", "forward", "fail", six(head)),
        ("mode=tp tp=2", "update", "fail", six(head, "update")),
        ("mode=msp tp=2", "forward", "fail", six(inner.format(1, 1))),
        ("mode=tp tp=4", "forward", "fail", six(head)),
        ("mode=isp", "forward", "fail", six(inner.format(3, 3))),
        ("mode=isp", "replicas", "pass", ""),
        ("mode=isp", "ledger", "unknown", "not decided"),
    ]
    first, second = bugs(pd.DataFrame(rows, columns=["case", "check", "verdict", "message"]))
    assert (first.case, first.check, first.message) == ("mode=tp tp=2", "forward", six(head))
    assert first.follows == "and update, forward fail from the same first place on in 2 cases"
    assert second.follows == "and forward fails from the same first place on in 1 case"
    more = [*rows, ("mode=tp tp=8", "update", "fail", six(head, "update"))]
    named, _ = bugs(pd.DataFrame(more, columns=["case", "check", "verdict", "message"]))
    assert named.follows == "and update (2 cases), forward fail from the same first place on in 3 cases"
    assert bugs(pd.DataFrame(rows[:1], columns=["case", "check", "verdict", "message"]))[0].follows == ""


def test_the_simplest_case_is_shown_first(tmp_path: Path) -> None:
    head, inner = "backward of head in step 0: act_grad/head", "forward of layers.0 in step 0: act/layers.0"
    cases = (
        ("mode=isp tp=2 dtype=bfloat16", "bfloat16", 2, 2, head),
        ("mode=isp tp=8", "float64", 8, 2, inner),
        ("mode=tp dtype=float32", "float32", 2, 2, head),
        ("mode=tp tp=4", "float64", 4, 2, head),
        ("mode=tp tp=4 steps=3", "float64", 4, 3, head),
    )
    store = Store(tmp_path, "my:subject", {})
    names = ("case", "dtype", "world_size", "steps")
    store.plan({"mode": "tp", "micro": 2, **dict(zip(names, row[:-1], strict=True))} for row in cases)
    for words, *_, first in cases:
        found = Verdict(case=words, check="forward", verdict="fail", worst=None, message=six(first))
        store.add(words, "", (), (found,), {})
    store.close()
    run = load(store.path)
    simplest = ["mode=tp tp=4", "mode=isp tp=8"]
    assert [bug.case for bug in bugs(simplest_first(run))] == simplest
    assert [group.case for group in failures.groups(simplest_first(run), run.path, run.ledger)] == simplest


def test_a_place_that_another_test_reported_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with Prover.on("parallel.subject:subject", "2") as prover:

        def failing(test: str, *checks: str) -> str:
            monkeypatch.setenv("PYTEST_CURRENT_TEST", f"{test} (call)")
            message = six("loss in step 0: loss/0")
            return prover._report(
                [Verdict(case="mode=tp", check=check, verdict="fail", worst=None, message=message) for check in checks]
            )

        whole = failing("test_a", "forward", "update")
        assert whole == six("loss in step 0: loss/0") + "\nand from there on: update"
        assert failing("test_a", "forward", "update") == whole  # a case that is shrunk and run again is told in full
        assert failing("test_b", "ledger").splitlines() == [
            "ledger of mode=tp",
            "fails from the same first place on as test_a",
            "repeat: shardproof run",
        ]
