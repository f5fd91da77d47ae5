"""The first wrong module where no layout is declared."""

from pathlib import Path

import pytest

import shardproof
from shardproof.harness.diagnosing.placing.modules_by_name import locate_wrong_module
from shardproof.harness.engines.processes.forked.pool import PoolEngine
from shardproof.harness.engines.threads.inproc import InprocEngine
from shardproof.harness.running import explaining
from shardproof.harness.running.locating import wrong_module
from shardproof.harness.running.locating.wrong_module import modules_of
from shardproof.harness.running.proof import prove
from shardproof.harness.running.trials.runs import record_case
from shardproof.harness.running.trials.trial import EXPLAINING, Trial, reference_of
from shardproof.harness.subject import case_of, resolve_subject
from shardproof.harness.verdicts.verdict import FAIL
from shardproof.parallel.subject import subject as ours
from shardproof.reference.case import Case
from shardproof.reports.pages.opening import tabulate_runs
from shardproof.reports.stored.frames import load
from tests.deep import deep
from tests.harness import own_words
from tests.harness.proofs import ran
from tests.harness.running.locating.by_hand import subject
from tests.harness.running.locating.dense import REFERENCE, truth
from tests.harness.running.locating.planting import (
    bugs_of,
    diagnosed,
    is_foreign,
    is_right,
    place,
    wordless,
    wrong_subject,
)

OPEN = bugs_of("places")
BUGS = {**OPEN, **bugs_of("held_back/places")}
SOME = {
    "attention-without-its-mask": "",
    "one-column-linear-does-not-sum-its-input-s-gradient": "not_summed",
    "ours-input-gradient-of-one-linear-halved": "size_factor",
    "reduce-scatter-hands-out-other-parts": "other_part",
    "row-wise-plan-that-sums-nothing": "not_summed",
    "mlp-averaged": "size_factor",
}
"""Bug -> the cause that its first module's numbers show, "" for none."""


@pytest.mark.parametrize("name", [*list(SOME)[:4], *deep("six CPU seconds", *list(SOME)[4:])])
def test_a_bug_is_traced_to_its_module_without_a_declared_layout(name: str, engine: InprocEngine) -> None:
    bug = BUGS[name]
    result = diagnosed(bug, engine)
    assert result.diagnosis is not None
    assert is_right(place(result.diagnosis), bug)
    assert SOME[name] in {"", *(cause.id for cause in result.diagnosis.causes)}
    told = next(verdict.message for verdict in result.verdicts if verdict.verdict == "fail")
    assert "{} of {} in step 0".format(*place(result.diagnosis) or ()) in told
    assert "found by comparing modules" in told


def test_ranks_in_other_processes_send_what_their_modules_returned(pool: PoolEngine) -> None:
    bug = BUGS["row-linear-averages"]
    result = prove(
        Case.parse(bug.case), "tests.harness.running.locating.averaging_subject:subject", pool, reference=REFERENCE
    )
    assert place(result.diagnosis) == (bug.phase, bug.region)


WORDS = {"layers": 2, "hidden": 16, "ffn": 24, "head_dim": 4, "vocab": 40, "seq": 8, "batch": 2, "micro": 3}
"""Words of its own for the decoder split by hand."""


@pytest.mark.parametrize("compared_with", ["", "alone"])
def test_an_own_truth_and_a_subject_on_one_rank_are_captured_too(compared_with: str, engine: InprocEngine) -> None:
    bug = BUGS["row-linear-without-its-all-reduce"]
    own = wordless(wrong_subject(bug))
    vars(own).update(words=WORDS, truth=truth)
    result = shardproof.prove("tp=2 dp=1", own, engine, truth=compared_with)
    assert place(result.diagnosis) == (bug.phase, bug.region)


def test_nothing_is_looked_for_where_nothing_failed_or_memory_may_not_hold_it(
    engine: InprocEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    bug = BUGS["row-linear-averages"]
    right = prove(Case.parse(bug.case), subject, engine, reference=REFERENCE)
    assert (right.verdict, "located" in right.seconds) == ("pass", False)
    monkeypatch.setattr(wrong_module, "memory_bytes", lambda: 1000)
    result = diagnosed(bug, engine)
    assert result.verdict == "fail"
    (note,) = [verdict for verdict in result.verdicts if verdict.check == "explanation"]
    assert "the first wrong module was not looked for" in note.message


def test_runs_that_explain_a_failure_share_their_time_and_those_left_out_are_on_the_page(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No time is left for any of them: the verdict stands, and the page says what was not run."""
    monkeypatch.setattr(explaining, "EXPLAINED_IN", -1)
    run = load(ran(tmp_path, own_words.Network(lambda case: 2.0), "tp=2").path)
    assert set(run.timings["part"]).isdisjoint(EXPLAINING)
    assert FAIL in {one.verdict for one in run.records}
    (explanation,) = [one for one in run.records if one.check == "explanation"]
    assert explanation.notes[0].names and {*explanation.notes[0].names} <= {*EXPLAINING}
    table = tabulate_runs(run)
    assert table is not None
    late = [row[1:] for row in table.rows if row[0].endswith(": not run for want of time")]
    assert late == [("1", "0.0")] * len(explanation.notes[0].names)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ours", "mode=isp family=internlm2 vocab=264 tp=2 wp=2 dp=2 packed=true positions=rope delivery=local"),
        pytest.param(
            "ours",
            "mode=tp-sp family=llama vocab=264 tp=2 dp=2 recompute=full dtype=bfloat16",
            marks=pytest.mark.deep("three CPU seconds"),
        ),
        ("shardproof.suites.subjects.two_d:subject", "tp=2 dp=2 sp=true dtype=float32"),
    ],
)
def test_modules_of_right_subjects_agree(name: str, text: str, engine: InprocEngine) -> None:
    subject = resolve_subject(wordless(ours) if name == "ours" else name)
    trial = Trial(case=case_of(text, subject), subject=subject, engine=engine, reference=reference_of(subject, engine))
    modules = modules_of(trial, record_case(trial))
    assert modules is not None
    assert locate_wrong_module(modules, forward=True, backward=False) is None
    assert locate_wrong_module(modules, forward=False, backward=True) is None


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["megatron-no-sum-leaves-a-region", "megatron-no-column-sums-its-gradient"])
def test_bugs_of_megatron_are_traced_too(name: str, engine: InprocEngine) -> None:
    pytest.importorskip("megatron.core", reason="needs the extra `peers`")
    assert is_right(place(diagnosed(BUGS[name], engine).diagnosis), BUGS[name])


@pytest.mark.deep("two CPU minutes")
def test_every_bug_on_which_the_search_was_developed_is_traced(engine: InprocEngine) -> None:
    found = {name: place(diagnosed(bug, engine).diagnosis) for name, bug in OPEN.items() if not is_foreign(bug)}
    assert {name: at for name, at in found.items() if not is_right(at, OPEN[name])} == {}
