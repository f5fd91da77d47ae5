"""Torch's own `fully_shard` issues what our shards of rows do: one `compare` of both runs, and the closed form."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from harness.cases import parse_cases
from harness.ledger import Event
from harness.running.request import Request
from harness.running.run import run
from harness.subject import named
from reference.case import Case
from reports.commands.cli import main
from suites.session.prover import Prover
from tests.parallel.data_parallel.by_fully_shard import subject

SIZES = "mode=tp tp=1 layers=2 heads=6 kv_heads=3 hidden=30 ffn=41 vocab=389 seq=9 batch=2 micro=3 steps=2 lr=0.1"
THEIRS = "tests.parallel.data_parallel.by_fully_shard:subject"


def test_one_compare_of_ours_and_torchs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every event alike, with its module and phase: rows that dp=4 does not divide, some ranks without any."""
    cases = parse_cases((f"{SIZES} dp=4 zero=2",))
    folders = []
    for name in ("parallel.subject:subject", THEIRS):
        result = run(Request(cases=cases, subject=named(name), out=tmp_path / name.partition(":")[0]))
        assert result.exit_status == 0
        folders.append(str(result.path))
    assert main(["compare", *folders, "--fail", "events:0"]) == 0
    assert "no limit is broken: events:0" in capsys.readouterr().out


@pytest.mark.parametrize("words", ["dp=3 zero=3", "dp=4 zero=3 recompute=full"])
def test_torch_gathers_a_layer_earlier_for_backward(prover: Prover, words: str) -> None:
    """Its next layer is prefetched: as many bytes, in another module. All else of the ledger and every number agree."""
    result = prover.proof(Case.parse(f"{SIZES} {words}"), subject)
    wrong = [verdict.check for verdict in result.verdicts if verdict.verdict != "pass"]
    assert wrong == ["ledger"]
    found, expected = Counter[tuple[object, ...]](), Counter[tuple[object, ...]]()
    for event in result.events:
        if event.rank == 0:
            found[_line(event)] += 1
    for term in subject.expected(Case.parse(f"{SIZES} {words}")):
        expected[_line(term)] += term.calls
    assert found == expected


@pytest.mark.parametrize(
    "words",
    ["pp=2 dp=3 zero=3 layers=3 first_layers=1", "pp=2 dp=2 zero=2 layers=4 micro=4 schedule=interleaved chunks=2"],
)
def test_stages_gather_and_reduce_as_often_as_torchs(prover: Prover, words: str) -> None:
    """Under the policy of torch's pipelines: at every stage the closed form's calls, and the dense model's numbers."""
    case = Case.parse(f"{SIZES} {words} no_sync=true tied=false metric=false")
    result = prover.proof(case, subject)
    assert {verdict.check for verdict in result.verdicts if verdict.verdict != "pass"} <= {"ledger"}
    for place in range(case.pp):
        found = Counter(_line(event) for event in result.events if event.rank == place * case.dp)
        expected = Counter[tuple[object, ...]]()
        for term in subject.expected(case):
            if term.at.get("pp", place) == place:
                expected[_line(term)] += term.calls
        assert found == expected


def _line(event: Event | object) -> tuple[object, ...]:
    """What is compared: where a gather of backward belongs is not."""
    fields = ("phase", "region", "op", "reduce_op", "axis", "dtype", "payload_bytes")
    line = [getattr(event, name) for name in fields]
    return (
        ("backward", "", *line[2:]) if line[2] == "all_gather" and line[0] in ("backward", "recompute") else tuple(line)
    )
