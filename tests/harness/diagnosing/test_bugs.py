"""One bug, one block: failures that share their first place are shown once, with the count of the others."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from harness.checking.evidence import Verdict
from harness.diagnosing.six_lines import site
from harness.running.store import Store
from reports.stored import failures
from reports.stored.failures import bugs, simplest_first
from reports.stored.frames import load
from suites.session.prover import Prover


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
    cases = {
        "mode=isp tp=2 dtype=bfloat16": ("bfloat16", 2, head),
        "mode=isp tp=8": ("float64", 8, inner),
        "mode=tp dtype=float32": ("float32", 2, head),
        "mode=tp tp=4": ("float64", 4, head),
        "mode=tp tp=4 steps=3": ("float64", 4, head),
    }
    store = Store(tmp_path, "my:subject", {})
    store.plan(
        {
            "case": case,
            "mode": "tp",
            "world_size": ranks,
            "dtype": dtype,
            "micro": 2,
            "steps": 3 if "steps" in case else 2,
        }
        for case, (dtype, ranks, _) in cases.items()
    )
    for case, (_, _, first) in cases.items():
        found = Verdict(case=case, check="forward", verdict="fail", worst=None, message=six(first))
        store.add(case, "", (), (found,), {})
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
            return prover._told(
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
