"""The runner: what passes, fails, is skipped or breaks, what is stored of it, and the exit status that says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.cases import parse_cases
from harness.engines import named as named_engines
from harness.engines.threads.inproc import InprocEngine
from harness.running.proof import prove
from harness.running.request import Request
from harness.running.run import RunResult, run
from harness.running.truth.reference import Reference
from harness.subject import named
from reference.case import Case
from reports.stored.frames import load
from tests.harness.toy_subjects import LoopEngine

TOY = "tests.harness.toy_subjects:"
ONE = "mode=tp tp=1 layers=1 hidden=16 heads=2 vocab=24 seq=8"
"""One rank: nothing to communicate, everything to compare."""

Start = Callable[..., RunResult]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    monkeypatch.setitem(named_engines.ENGINES, "inproc", f"{TOY}LoopEngine")

    def started(subject: str, *cases: str, **more: Any) -> RunResult:
        return run(
            Request(cases=parse_cases(cases or (ONE,)), subject=named(TOY + subject), out=tmp_path / "runs", **more)
        )

    return started


def words(result: RunResult) -> dict[str, str]:
    return {verdict.check: verdict.verdict for verdict in result.verdicts}


def test_a_right_subject_passes_and_its_folder_is_complete(start: Start) -> None:
    result = start("right", command=("shardproof", "run"))
    assert result.exit_status == 0
    assert set(words(result).values()) == {"pass"}
    assert {"forward", "parameter_gradients", "update", "gradient_norm", "determinism"} <= set(words(result))
    stored = load(result.path)
    assert stored.notes == ()
    assert list(stored.cases["case"]) == [str(Case.parse(ONE))]
    assert len(stored.verdicts) == len(result.verdicts)
    assert set(stored.timings["part"]) == {"recorded", "plain", "truth", "checks"}
    assert stored.env["request"]["engine"] == "inproc"


def test_a_subject_that_raises_fails_its_case_and_the_others_go_on(start: Start) -> None:
    result = start("raising", f"{ONE} seed=13", ONE)
    assert result.exit_status == 1
    failed, *passed = result.verdicts
    assert (failed.check, failed.verdict) == ("run", "fail")
    assert failed.message.startswith(
        "what:   the subject did not finish: rank 0 raised ZeroDivisionError: thirteen (check run)"
    )
    assert {verdict.verdict for verdict in passed} == {"pass"}
    assert len(load(result.path).verdicts) == len(result.verdicts)


@pytest.mark.parametrize(("seeds", "status"), [((13, 1), 3), ((14, 1), 3), ((13, 15), 1), ((1,), 0)])
def test_a_failing_machine_is_no_verdict_and_keeps_what_is_finished(
    start: Start, seeds: tuple[int, ...], status: int
) -> None:
    result = start("dying", *(f"{ONE} seed={seed}" for seed in seeds))
    assert result.exit_status == status
    stored = load(result.path).verdicts
    assert set(stored["case"].str.extract(r"seed=(\d+)")[0].astype(int)) == set(seeds)
    lost = [verdict for verdict in result.verdicts if verdict.check == "run"]
    assert [verdict.verdict for verdict in lost] == ["unknown"] * len({13, 14} & set(seeds))


def test_skipped_cases_show_their_reason_and_alone_are_no_pass(start: Start) -> None:
    result = start("limited")
    assert result.exit_status == 2
    (verdict,) = result.verdicts
    assert (verdict.check, verdict.verdict) == ("supported", "skip")
    assert verdict.message == f"{TOY}limited claims the modes tp-sp, not tp"
    mixed = start("refusing", f"{ONE} seed=2", f"{ONE} seed=3")
    assert mixed.exit_status == 0
    assert [verdict.message for verdict in mixed.verdicts if verdict.verdict == "skip"] == ["odd seeds bring bad luck"]
    stored = load(mixed.path).verdicts
    assert "odd seeds bring bad luck" in set(stored["message"])


def test_one_lucky_control_run_makes_no_false_alarm_and_hides_no_error() -> None:
    lucky = Reference(control=f"{TOY}lucky_control")
    case = Case.parse(f"{ONE} dtype=float32")
    assert prove(case, f"{TOY}noisy", LoopEngine(), reference=lucky).verdict == "pass"
    assert prove(case, f"{TOY}wrong", LoopEngine(), reference=lucky).verdict == "fail"
    once = prove(case, f"{TOY}right", LoopEngine(), reference=lucky)
    assert once.evidence is not None and len(once.evidence.controls) == 1  # nobody asked for more


@pytest.mark.parametrize("mesh", ["tp=2 heads=6", "tp=3 dp=2 heads=6"])
def test_dtensors_of_real_ranks_are_merged_without_communication(mesh: str, engine: InprocEngine) -> None:
    case = Case.parse(f"mode=tp layers=1 hidden=36 vocab=25 seq=8 {mesh}")
    result = prove(case, f"{TOY}distributed", engine)
    assert {verdict.check: verdict.message for verdict in result.verdicts if verdict.verdict != "pass"} == {}
    names = {verdict.check for verdict in result.verdicts}
    assert {"parameter_gradients", "update", "parallelism", "replicas"} <= names
    assert {event.op for event in result.events} <= {"broadcast", "scatter"}  # what distributes them, and no gathering


def test_equal_cases_are_run_once_whatever_their_wording() -> None:
    assert len(parse_cases(["mode=tp tp=2", "tp=2", "tp=2 mode=tp", "mode=tp-sp"])) == 2


def test_the_words_that_repeat_a_run_name_what_is_unusual() -> None:
    right = named(f"{TOY}right")
    assert Request(cases=(), subject=right).options == ""
    unusual = Request(cases=(), subject=right, engine="pool", device="cuda")
    assert unusual.options == "--engine pool --device cuda"
