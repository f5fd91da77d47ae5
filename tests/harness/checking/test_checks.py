"""Every check passes on right evidence and fails on planted wrong evidence; broken checks are unknown, never a pass."""

import ast
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch

from shardproof.harness.checking import records
from shardproof.harness.checking.call_checks import split_share
from shardproof.harness.checking.checks import CHECKS, Check, run_checks, select_checks_by_need
from shardproof.harness.checking.finding import Finding
from shardproof.harness.checking.records import (
    Calls,
    Claims,
    Documents,
    DryRun,
    Evidence,
    RecordedRun,
    Regroupings,
    Repeats,
    Truth,
)
from shardproof.harness.engines.engine import Unwaited
from shardproof.harness.errors import RequestError
from shardproof.harness.outcome.blocks import Block, localize
from shardproof.harness.protocols import Shard
from shardproof.harness.running.trials.trial import decoder
from shardproof.harness.verdicts.facts import NoteKind, state_fact, state_text  # noqa: F401  (the example of a page uses it)
from shardproof.harness.verdicts.sentences.rendering import SENTENCES
from shardproof.harness.verdicts.verdict import FAIL, PASS, UNKNOWN
from tests import ROOT
from tests.harness.noted import names_of, reasons_of
from tests.harness.proofs import proved
from tests.harness.toy_evidence import but, case, events, evidence, named, outcome_of, planted, truth

SUBJECT = "shardproof.parallel.subject:subject"
W1, BIAS = "layers.0.mlp.w1.weight", "layers.0.mlp.w2.bias"


ASKED = set(CHECKS) - {"waits", "overlap", "saved", "routing", "documents"}
"""The checks that cases without asynchronous calls, checkpoints, experts and packed rows have."""
COVERAGE = {"coverage": CHECKS["coverage"]}


def whole() -> dict[str, Any]:
    """Outcome of a rank that holds every gradient whole."""
    return {
        name: Shard(tensor, (0,) * tensor.dim(), tuple(tensor.shape)) if name.startswith("grad/") else tensor
        for name, tensor in truth().items()
    }


def test_right_evidence_passes_every_check() -> None:
    findings = run_checks(evidence())
    assert named(findings, PASS) == set(findings) == ASKED
    assert [note.kind for finding in findings.values() for note in finding.notes] == [NoteKind.SPLIT_SHARE]


def test_a_count_in_bfloat16_fails_tokens_alone_and_both_counts_are_named() -> None:
    findings = run_checks(planted({"tokens/1": truth()["tokens/1"].bfloat16().long()}))
    assert named(findings, FAIL) == {"tokens"}
    assert findings["tokens"].message == "tokens/1 is 264, and the dense model counts 263"


def test_each_check_says_what_it_did_not_see() -> None:
    values = {name: tensor for name, tensor in truth().items() if name in ("loss/0", f"grad/{W1}")}
    findings = run_checks(evidence(*(outcome_of(rank, values) | {"grad/typo": torch.ones(2)} for rank in range(2))))
    assert set(names_of(findings["forward"])) == {"loss/1", "logits/0", "logits/1"}
    assert "grad/typo" in names_of(findings["parameter_gradients"], "not in the truth")
    assert f"grad/{BIAS}" in names_of(findings["parameter_gradients"], "not returned")
    assert "param/" + W1 in names_of(findings["coverage"], "not returned")
    assert "update" not in findings and "gradient_norm" not in findings


def test_a_name_that_the_truth_does_not_know_is_no_pass_and_the_nearest_one_is_told() -> None:
    slip = {name.replace("param/", "params/"): tensor for name, tensor in truth().items()}
    finding = run_checks(evidence(*(outcome_of(rank, slip) for rank in range(2))), COVERAGE)["coverage"]
    assert finding.verdict == UNKNOWN
    assert f"params/{BIAS} (param/{BIAS}?)" in finding.message and f"params/{BIAS}" in names_of(finding)
    own = but(evidence(), captured=(localize({"act/my_module": torch.ones(2)}),) * 2)
    assert run_checks(own, COVERAGE)["coverage"].verdict == PASS, "a module of its own"


@pytest.mark.parametrize("returned", [{}, {"my_loss": torch.ones(())}])
def test_a_subject_that_returns_nothing_checkable_fails(returned: dict[str, Any]) -> None:
    findings = run_checks(evidence(returned, returned))
    assert findings["coverage"].verdict == FAIL
    assert findings["coverage"].message.startswith("nothing checkable: it returned")
    assert not {"forward", "update"} & named(findings, PASS)


def test_a_layout_flaw_is_said_before_numbers_and_keeps_the_tensor_out_of_them() -> None:
    first, second = (outcome_of(rank, truth()) for rank in range(2))
    second[f"grad/{W1}"] = first[f"grad/{W1}"]
    findings = run_checks(evidence(first, second))
    assert named(findings, FAIL) == {"merge"}
    assert "are held by no rank" in findings["merge"].message
    assert names_of(findings["parameter_gradients"], "has a flaw") == [f"grad/{W1}"]
    assert findings["parameter_gradients"].decided["grad"] == (4, 4), "it is found wrong"
    assert names_of(findings["replicas"]) == [f"grad/{W1}"]


def test_runs_that_differ_without_recording_are_not_deterministic() -> None:
    other = [outcome_of(rank, {**truth(), "loss/0": truth()["loss/0"] + 1e-15}) for rank in range(2)]
    third = [outcome_of(rank, {**truth(), "loss/0": truth()["loss/0"] + 2e-15}) for rank in range(2)]
    shaky = evidence(repeat=other)
    assert named(run_checks(shaky), FAIL) == {"determinism"}
    assert shaky.repeats
    shaky = but(shaky, repeats=Repeats(runs=(*shaky.repeats.runs, [localize(rank) for rank in third])))
    findings = run_checks(shaky)
    assert named(findings, FAIL) == {"determinism"}
    words = "loss/0 on rank 0 differs between two runs of the same case: in 1"
    assert findings["determinism"].message.startswith(words)
    fewer = [outcome_of(rank, {k: v for k, v in truth().items() if k != "loss/1"}) for rank in range(2)]
    alone = run_checks(evidence(repeat=fewer))["determinism"]
    assert alone.verdict == FAIL and alone.message.endswith("only one of the runs returned it")


def test_a_split_that_moves_nothing_fails_although_every_number_is_right() -> None:
    findings = run_checks(evidence(events=(), expectation=None))
    assert named(findings, FAIL) == {"parallelism"}
    assert findings["parallelism"].message == "no rank sent or received anything in a mesh of tp=2"
    one_sided = tuple(event for event in events() if event.rank == 0)
    assert run_checks(evidence(events=one_sided, expectation=None))["parallelism"].ranks == (1,)
    alone = tuple(replace(event, group_size=1) for event in events())
    assert run_checks(evidence(events=alone, expectation=None))["parallelism"].verdict == FAIL
    one = run_checks(evidence(truth(), case=case("mode=tp tp=1"), events=(), expectation=None))
    assert "parallelism" not in one and not named(one, FAIL), "one rank has none to prove"


def test_ranks_that_hold_everything_in_full_fail_although_they_talk_where_an_axis_splits_weights() -> None:
    """mode=isp tp=2 wp=1 has whole weights on every rank, and is right; tp=2 wp=2 has not."""
    findings = run_checks(evidence(whole(), whole()))
    assert named(findings, FAIL) == {"parallelism"}
    assert "every rank holds the full tensor of all 4 shards" in findings["parallelism"].message
    assert "parallelism" in named(run_checks(evidence(whole(), whole(), case=case("mode=isp tp=2 wp=2"))), FAIL)
    owned = whole()  # each tensor lies on one rank, as embedding tables that are distributed whole
    shards = [name for name in owned if name.startswith("grad/")]
    parts = [owned | dict.fromkeys(shards[rank::2], []) for rank in (0, 1)]
    assert "parallelism" not in named(run_checks(evidence(*parts)), FAIL)
    finding = run_checks(evidence(whole(), whole(), case=case("mode=isp tp=2 wp=1")))["parallelism"]
    assert finding.verdict == PASS and finding.message.endswith("; no axis of it splits weights")
    finding = run_checks(evidence(truth(), truth()))["parallelism"]
    assert (finding.verdict, reasons_of(finding)) == (PASS, ["local shapes: every tensor was returned in full"])


def test_the_share_of_the_parameters_that_is_split_is_of_their_elements() -> None:
    def outcomes(*held: tuple[str, tuple[int, int], bool]) -> list[Mapping[str, tuple[Block, ...]]]:
        """The outcomes of two ranks that hold these names in these shapes, split or whole."""
        ranks: list[dict[str, Any]] = [{}, {}]
        for name, (rows, columns), split in held:
            for rank, part in enumerate(
                torch.zeros(rows, columns).chunk(2) if split else [torch.zeros(rows, columns)] * 2
            ):
                ranks[rank][name] = Shard(part, (rank * rows // 2 * split, 0), (rows, columns))
        return [localize(rank) for rank in ranks]

    assert split_share(outcomes(("param/a", (4, 3), True), ("param/b", (4, 9), False))) == 25
    assert split_share(outcomes(("grad/a", (4, 3), True), ("param/b", (4, 9), False))) == 0  # param/ is what counts
    assert split_share(outcomes(("grad/head", (2, 1), True), ("grad/b", (40, 90), False))) == 1  # little is not nothing
    stages = outcomes(("param/a", (4, 3), False))
    assert split_share([stages[0], {}]) == 100  # a stage of a pipeline
    assert split_share([localize({"param/a": torch.zeros(4, 3)})] * 2) is None  # of what is returned in full


def test_works_that_nobody_waits_for_fail_and_waited_ones_pass() -> None:
    work = Unwaited(rank=1, op="all_gather", number=0, group="tp (0 1)", caller="model.py:9 in forward")
    finding = run_checks(evidence(unwaited=tuple(replace(work, number=number) for number in range(3))))["waits"]
    assert finding.verdict == FAIL and finding.ranks == (1,)
    assert finding.message == "all_gather #0 of tp (0 1) at model.py:9 in forward was never waited for; 2 more like it"
    started = tuple(replace(event, is_async=True) for event in events())
    assert run_checks(evidence(events=started))["waits"].verdict == PASS
    assert "waits" not in run_checks(evidence())


def test_an_exception_inside_a_check_is_unknown_with_its_text() -> None:
    def broken(run: RecordedRun) -> Finding:
        raise ZeroDivisionError("no such thing")

    findings = run_checks(evidence(), {"broken": broken, "merge": CHECKS["merge"]})
    assert findings["broken"].verdict == UNKNOWN
    assert findings["broken"].message == "the check itself failed: ZeroDivisionError: no such thing"
    assert findings["merge"].verdict == PASS


def test_a_check_reads_the_records_that_its_signature_names_and_is_not_run_without_one() -> None:
    read = list[object]()

    def ordered(claims: Claims, calls: Calls, truth: Truth | None = None) -> None:
        read.extend((claims, calls, truth))

    def regrouped(regroupings: Regroupings) -> Finding:
        return Finding(verdict=FAIL, facts=(state_text(str(regroupings)),))

    def mistyped(seen: Evidence) -> Finding:
        return Finding(verdict=PASS, facts=(state_text(str(seen)),))

    seen: Evidence = evidence()
    checks: dict[str, Check] = {"ordered": ordered, "regrouped": regrouped, "mistyped": mistyped}
    findings = run_checks(seen, checks)
    assert read == [seen.claims, seen.run.calls, seen.truth]
    assert named(findings, UNKNOWN) == {*findings} == {"mistyped"}
    said = findings["mistyped"].message
    assert "seen of the check" in said and "legal: Calls, RecordedRun, " in said
    run_checks(replace(seen, dry=DryRun(memory=state_text(""))), checks)
    assert read[3:] == [seen.claims, seen.run.calls, None], "a dry run has no truth"
    kept = [one for one in vars(records).values() if is_dataclass(one) and one.__module__ == records.__name__]
    assert max(len(fields(one)) for one in kept) <= 14, "a record is read at one sight"
    of_calls = {name for name in CHECKS if name not in select_checks_by_need(CHECKS, RecordedRun, Truth, Documents)}
    assert of_calls == {"ledger", "groups", "waits", "overlap"}
    assert set(select_checks_by_need(CHECKS, Repeats)) == {"determinism", "recording"}


def test_the_example_of_the_page_on_design_is_a_check(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    code, sentences = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "large_share" in block)
    for id, sentence in ast.literal_eval(f"{{{sentences}}}").items():
        monkeypatch.setitem(SENTENCES, id, sentence)
    made = {**globals(), "Counter": Counter}
    exec(code, made)  # noqa: S102  (a page of this project)
    checks = {"shares": made["shares"]}
    assert run_checks(evidence(), checks) == {}, "of two ranks one always sends half"
    four = case("mode=tp tp=4 kv_heads=4 seq=16")
    assert run_checks(evidence(case=four, events=events(world_size=4)), checks)["shares"].verdict == PASS
    ledger = events(world_size=4)
    more = [replace(call, wire_bytes=9 * call.wire_bytes) if call.rank == 1 else call for call in ledger]
    found = run_checks(evidence(case=four, events=tuple(more)), checks)["shares"]
    assert (found.verdict, found.ranks) == (FAIL, (1,))
    assert re.fullmatch(r"rank 1 sends \d+ of \d+ bytes", found.message)


def test_the_dense_model_is_computed_only_where_a_check_needs_it_or_a_failure_is_explained() -> None:
    """The dense model cannot be computed here, so a case that needs it ends in an error."""

    def refused(*_: Any, **__: Any) -> Mapping[str, Any]:
        raise ValueError("no truth")

    words = "mode=tp tp=2 layers=1 micro=1 steps=1"
    prove = partial(proved, SUBJECT, reference=replace(decoder(), truth=refused))
    ledger, loss = ({name: CHECKS[name]} for name in ("ledger", "forward"))
    for dtype in ("float64", "float32"):
        right = prove(case(f"{words} dtype={dtype}"), checks=ledger)
        assert right.verdict == PASS and [*right.seconds] == ["recorded", "checks"]
        with pytest.raises(RequestError, match="no truth"):
            prove(case(f"{words} dtype={dtype}"), checks=loss)
    wrong = {"ledger": CHECKS["ledger"], "never": lambda: Finding(verdict=FAIL, facts=(state_text("it never holds"),))}
    assert prove(case(words), checks=wrong, explain=False).verdict == FAIL
    with pytest.raises(RequestError, match="no truth"):
        prove(case(words), checks=wrong)


def test_captured_activations_are_checked_like_returned_ones() -> None:
    returned = {name: tensor for name, tensor in truth().items() if not name.startswith("act")}
    captured = [localize({name: truth()[name] for name in truth() if name.startswith("act")}) for _ in range(2)]
    ranks = tuple(outcome_of(rank, returned) for rank in range(2))
    assert not {"activations", "activation_gradients"} & set(run_checks(evidence(*ranks)))
    findings = run_checks(evidence(*ranks, captured=captured))
    assert named(findings, PASS) == ASKED
    captured[1] = localize({name: truth()[name] * 2 for name in truth() if name.startswith("act/")})
    assert named(run_checks(evidence(*ranks, captured=captured)), FAIL) == {"merge", "replicas"}
