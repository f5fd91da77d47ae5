"""The runner: what passes, fails, is skipped or breaks, what is stored of it, and the exit status that says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shardproof
from harness.cases import parse_cases
from harness.engines import named as named_engines
from harness.engines.threads.inproc import InprocEngine
from harness.errors import RequestError
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


def test_a_wrong_gradient_fails_with_six_lines_and_status_one(start: Start) -> None:
    result = start("wrong")
    assert result.exit_status == 1
    (failed,) = [verdict for verdict in result.verdicts if verdict.verdict == "fail"]
    assert failed.check == "parameter_gradients"
    lines = failed.message.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["what", "where", "error", "first", "causes", "repeat"]
    assert lines[-1] == f'repeat: shardproof run "{Case.parse(ONE)}" --subject {TOY}wrong'


def test_what_is_not_returned_is_said_and_does_not_fail(start: Start) -> None:
    result = start("losses_only")
    assert result.exit_status == 0
    coverage = next(verdict for verdict in result.verdicts if verdict.check == "coverage")
    assert "grad/final_norm.weight" in coverage.unchecked and "act/head" in coverage.unchecked
    assert "update" not in words(result)
    assert start("empty").exit_status == 1


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


def test_another_last_bit_in_every_run_fails_determinism(start: Start) -> None:
    result = start("shaky")
    assert {check for check, word in words(result).items() if word == "fail"} == {"determinism"}


def test_an_expectation_that_raises_is_unknown_not_a_pass(start: Start) -> None:
    result = start("broken_expectation")
    assert result.exit_status == 1
    assert words(result)["expectation"] == "unknown"


def test_activations_that_cannot_be_placed_are_unknown_and_hide_nothing_else(start: Start) -> None:
    result = start("misplaced")
    assert result.exit_status == 1
    unknown = [verdict for verdict in result.verdicts if verdict.verdict != "pass"]
    assert [verdict.check for verdict in unknown] == ["activations"]
    assert unknown[0].message.startswith(
        "subject.activations failed: LookupError: 0, at tests/harness/toy_subjects.py:"
    )


def test_low_precision_is_held_against_a_control_run(start: Start) -> None:
    result = start("right", f"{ONE} dtype=bfloat16", f"{ONE} dtype=float32")
    assert result.exit_status == 0
    assert "control" in set(load(result.path).timings["part"])
    gradients = [verdict for verdict in result.verdicts if verdict.check == "parameter_gradients"]
    assert all(verdict.worst is not None and 0 < verdict.worst.error < verdict.worst.allowed for verdict in gradients)
    assert start("wrong", f"{ONE} dtype=bfloat16").exit_status == 1


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


def test_progress_tells_every_case_as_it_ends(start: Start, tmp_path: Path) -> None:
    told: list[tuple[int, int, str]] = []
    request = Request(cases=parse_cases((ONE, f"{ONE} seed=1")), subject=named(f"{TOY}right"), out=tmp_path)
    run(request, lambda done, total, case, verdict: told.append((done, total, verdict)))
    assert told == [(1, 2, "pass"), (2, 2, "pass")]


def test_the_page_is_asked_for_when_the_folder_is_finished(start: Start) -> None:
    seen: list[Path] = []
    result = start("right", page=seen.append)
    assert seen == [result.path]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cases": ()}, "cases=.*at least one case is needed"),
        ({"cases": ("mode=tp tp=zwei",)}, "case 'mode=tp tp=zwei': tp=zwei: must be a whole number; legal: tp=1"),
        ({"cases": ("colour=blue",)}, "colour=blue: is not a word of the case language"),
        ({"subject": "no.such:thing"}, "there is no module 'no'"),
        ({"engine": "steam"}, "engine=steam: is not a known engine; legal: inproc"),
        ({"cases": (f"{ONE} data=/no/such/file",)}, "the dense model cannot compute it: .*/no/such/file"),
    ],
)
def test_a_wrong_request_is_one_message_with_status_two(
    start: Start, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    fields: dict[str, Any] = {"cases": (ONE,), "subject": f"{TOY}right", "out": tmp_path, **changes}
    with pytest.raises(RequestError, match=words) as caught:
        shardproof.run(**fields)
    assert caught.value.exit_status == 2


def test_equal_cases_are_run_once_whatever_their_wording() -> None:
    assert len(parse_cases(["mode=tp tp=2", "tp=2", "tp=2 mode=tp", "mode=tp-sp"])) == 2


def test_the_words_that_repeat_a_run_name_what_is_unusual() -> None:
    right = named(f"{TOY}right")
    assert Request(cases=(), subject=right).options == ""
    unusual = Request(cases=(), subject=right, engine="pool", device="cuda")
    assert unusual.options == "--engine pool --device cuda"


def test_one_case_can_be_proved_without_a_folder() -> None:
    result = prove(Case.parse(ONE), f"{TOY}right", LoopEngine())
    assert result.verdict == "pass" and result.events == () and result.evidence is not None
