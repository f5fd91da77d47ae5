"""Campaigns: false alarms counted on distinct valid cases; the first wrong module where no layout is declared."""

import csv
import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

import shardproof
from bench.clean import Part, campaign, cases_of, main
from bench.places.by_hand import subject
from bench.places.dense import REFERENCE, truth
from bench.places.planting import bugs_of, diagnosed, found, is_right, place, wordless, wrong_subject
from shardproof.harness.diagnosing.placing.modules_by_name import located
from shardproof.harness.engines.processes.forked.pool import PoolEngine
from shardproof.harness.engines.threads.inproc import InprocEngine
from shardproof.harness.running.locating import wrong_module
from shardproof.harness.running.locating.wrong_module import modules_of
from shardproof.harness.running.proof import prove
from shardproof.harness.running.trials.reference import reference_of
from shardproof.harness.running.trials.runs import recorded
from shardproof.harness.running.trials.trial import Trial
from shardproof.harness.subject import case_of, named
from shardproof.parallel.subject import subject as ours
from shardproof.reference.case import Case
from shardproof.reference.language.modes import MODES
from shardproof.suites.drawing.sizes import HIDDEN, TOKENS, large
from shardproof.suites.drawing.strategies import NOT_DRAWN, every_word
from shardproof.suites.session.sampling import sampled

BUGS = {**bugs_of("places"), **bugs_of("held_back/places")}
SOME = {
    "attention-without-its-mask": "",
    "one-column-linear-does-not-sum-its-input-s-gradient": "not_summed",
    "row-wise-plan-that-sums-nothing": "not_summed",
    "ours-input-gradient-of-one-linear-halved": "averaged",
    "reduce-scatter-hands-out-other-parts": "shifted_shard",
    "mlp-averaged": "averaged",
}
"""Bug -> the cause that its first module's numbers show, "" for none."""


@pytest.mark.parametrize("name", SOME)
def test_a_bug_is_traced_to_its_module_without_a_declared_layout(name: str, engine: InprocEngine) -> None:
    bug = BUGS[name]
    result = diagnosed(bug, engine)
    assert result.diagnosis is not None
    assert is_right(place(result.diagnosis), bug)
    assert SOME[name] in {"", *(cause.id for cause in result.diagnosis.causes)}
    told = next(verdict.message for verdict in result.verdicts if verdict.verdict == "fail")
    assert "{} of {} in step 0".format(*place(result.diagnosis) or ()) in told
    assert "no layout was declared" in told


def test_ranks_in_other_processes_send_what_their_modules_returned(pool: PoolEngine) -> None:
    bug = BUGS["row-linear-averages"]
    result = prove(Case.parse(bug.case), "tests.bench.averaging_subject:subject", pool, reference=REFERENCE)
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
    assert (result.verdict, "located" in result.seconds) == ("fail", False)
    (note,) = [verdict for verdict in result.verdicts if verdict.check == "explanation"]
    assert "the first wrong module was not looked for" in note.message


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ours", "mode=isp family=internlm2 vocab=264 tp=2 wp=2 dp=2 packed=true positions=rope delivery=local"),
        ("ours", "mode=tp-sp family=llama vocab=264 tp=2 dp=2 recompute=full dtype=bfloat16"),
        ("shardproof.suites.subjects.two_d:subject", "tp=2 dp=2 sp=true dtype=float32"),
    ],
)
def test_modules_of_right_subjects_agree(name: str, text: str, engine: InprocEngine) -> None:
    subject = named(wordless(ours) if name == "ours" else name)
    trial = Trial(case=case_of(text, subject), subject=subject, engine=engine, reference=reference_of(subject, engine))
    modules = modules_of(trial, recorded(trial))
    assert modules is not None
    assert located(modules, forward=True, backward=False) is None
    assert located(modules, forward=False, backward=True) is None


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["megatron-no-sum-leaves-a-region", "megatron-no-column-sums-its-gradient"])
def test_bugs_of_megatron_are_traced_too(name: str) -> None:
    pytest.importorskip("megatron.core", reason="needs the extra `peers`")
    assert is_right(found(BUGS[name]), BUGS[name])


def wrong(case: Case, device: torch.device) -> Mapping[str, object]:
    """Ours, with the first loss a little too large."""
    outcome = dict(ours(case, device))
    loss = outcome["loss/0"]
    assert isinstance(loss, Tensor)
    return outcome | {"loss/0": loss * (1 + 1e-6)}


def listening(case: Case, device: torch.device) -> Mapping[str, object]:
    """Refuses every case, and keeps its text."""
    raise AssertionError(case)


def _listen(case: Case) -> str:
    LISTENED.append(str(case))
    return "listens"


LISTENED: list[str] = []
vars(wrong)["modes"] = ("tp",)
vars(listening).update(modes=("tp",), refuses=_listen)


def test_shares_of_all_parts_add_up() -> None:
    shares = [Part(cases=100, number=number, parts=3).shares() for number in (1, 2, 3)]
    assert sum(sum(share.values()) for share in shares) == 100
    assert all(set(share) == set(MODES) for share in shares)
    least = 100 // (3 * len(MODES))
    assert {count for share in shares for count in share.values()} == {least, least + 1}


def test_a_right_subject_is_quiet(tmp_path: Path) -> None:
    assert main(["--cases", "6", "--out", str(tmp_path)]) == 0
    (row,) = csv.DictReader((tmp_path / "clean-any-1-of-1.csv").read_text().splitlines())
    assert (row["cases"], row["refused"], row["alarms"]) == ("6", "0", "0")


def test_a_wrong_subject_is_not(tmp_path: Path) -> None:
    words = ("--subject", f"{__name__}:wrong", "--cases", "1", "--dtype", "float64", "--steps", "1")
    assert main([*words, "--out", str(tmp_path)]) == 1
    (alarm,) = (json.loads(line) for line in (tmp_path / "alarms-float64-1-of-1.jsonl").read_text().splitlines())
    assert alarm["check"] == "forward" and Case.parse(alarm["case"]).steps == 1


def test_parts_draw_different_cases() -> None:
    texts = []
    for number in (1, 2):
        LISTENED.clear()
        part = Part(subject=f"{__name__}:listening", cases=4, number=number, parts=2, dtype="float64", steps=1)
        assert [so_far.refused for so_far, _ in campaign(part)] == [1, 2]
        texts.append(set(LISTENED))
    assert len(texts[0]) == len(texts[1]) == 2
    assert len(texts[0] | texts[1]) == 3  # the simplest case comes first whatever the seed


def test_every_fifth_case_is_at_a_size_that_users_train() -> None:
    drawn = [cases_of("tp", 6, Part(number=number, parts=5)) for number in range(1, 6)]
    last = [case for cases, many in zip(drawn, (1, 1, 1, 2, 1), strict=True) for case in cases[-many:]]
    assert (sum(map(len, drawn)), len(last)) == (30, 6)
    assert all(case.hidden >= 200 or case.seq * case.batch * case.micro * case.dp >= 700 for case in last)


def test_large_cases_have_up_to_16384_tokens_or_hidden_2048_in_every_dtype() -> None:
    drawn = sampled(st.sampled_from(tuple(MODES)).flatmap(large), 60, 2)
    tokens = [case.seq * case.batch * case.micro * case.dp for case in drawn]
    assert max(TOKENS) * 0.9 < max(tokens) <= max(TOKENS) == 16_384
    assert max(HIDDEN) * 0.9 < max(case.hidden for case in drawn) <= max(HIDDEN) == 2048
    assert {case.dtype for case in drawn} == {"float64", "float32", "bfloat16", "float16"}


def test_a_wrong_request_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--part=0/2", "--part=x", "--cases=0", "--steps=-1"):
        assert main([option, "--out", str(tmp_path)]) == 2
        told = capsys.readouterr().err
        assert told.startswith(f"bench.clean: {option.removeprefix('--')}") and told.count("\n") == 1


def test_every_word_of_the_case_language_is_drawn_or_left_out_for_a_reason() -> None:
    cases = [case for number, mode in enumerate(MODES) for case in sampled(every_word(mode), 24, number)]
    cases += sampled(every_word("tp", needs=("experts",), dtype="float64"), 30, 0)  # there routers choose
    drawn = {field.name: {getattr(case, field.name) for case in cases} for field in fields(Case)}
    assert {word for word, values in drawn.items() if len(values) == 1} == set(NOT_DRAWN)
    for word, legal in Case.legal_words().items():
        assert word in NOT_DRAWN or drawn[word] == set(legal), word
    assert {1.0, 0.1} <= drawn["lr"] and {0.0, 1.0} <= drawn["clip"] and {1, 2, 3, 20} <= drawn["steps"]
