"""Every check passes on right evidence and fails on planted wrong evidence; broken checks are unknown, never a pass."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from shardproof.harness.checking.call_checks import split_share
from shardproof.harness.checking.checks import CHECKS, examine
from shardproof.harness.checking.evidence import FAIL, PASS, UNKNOWN, Evidence, Finding
from shardproof.harness.engines.engine import Unwaited
from shardproof.harness.outcome.blocks import Block, localize
from shardproof.harness.protocols import Shard
from tests.harness.toy_evidence import case, events, evidence, named, outcome_of, planted, truth

W1, BIAS = "layers.0.mlp.w1.weight", "layers.0.mlp.w2.bias"


ASKED = set(CHECKS) - {"waits", "overlap", "saved", "routing"}
"""Nothing asynchronous, no checkpoint, no experts."""
COVERAGE = {"coverage": CHECKS["coverage"]}


def whole() -> dict[str, Any]:
    """Outcome of a rank that holds every gradient whole."""
    return {
        name: Shard(tensor, (0,) * tensor.dim(), tuple(tensor.shape)) if name.startswith("grad/") else tensor
        for name, tensor in truth().items()
    }


def test_right_evidence_passes_every_check() -> None:
    findings = examine(evidence())
    assert named(findings, PASS) == set(findings) == ASKED
    assert all(not finding.unchecked for finding in findings.values())


def test_a_count_in_bfloat16_fails_tokens_alone_and_both_counts_are_named() -> None:
    findings = examine(planted({"tokens/1": truth()["tokens/1"].bfloat16().long()}))
    assert named(findings, FAIL) == {"tokens"}
    assert findings["tokens"].message == "tokens/1 is 264, and the dense model counts 263"


def test_each_check_says_what_it_did_not_see() -> None:
    values = {name: tensor for name, tensor in truth().items() if name in ("loss/0", f"grad/{W1}")}
    findings = examine(evidence(*(outcome_of(rank, values) | {"grad/typo": torch.ones(2)} for rank in range(2))))
    assert set(findings["forward"].unchecked) == {"loss/1", "logits/0", "logits/1"}
    assert "grad/typo" in findings["parameter_gradients"].unchecked
    assert f"grad/{BIAS}" in findings["parameter_gradients"].unchecked
    assert "param/" + W1 in findings["coverage"].unchecked
    assert "update" not in findings and "gradient_norm" not in findings


def test_a_name_that_the_truth_does_not_know_is_no_pass_and_the_nearest_one_is_told() -> None:
    slip = {name.replace("param/", "params/"): tensor for name, tensor in truth().items()}
    finding = examine(evidence(*(outcome_of(rank, slip) for rank in range(2))), COVERAGE)["coverage"]
    assert finding.verdict == UNKNOWN
    assert f"params/{BIAS} (param/{BIAS}?)" in finding.message and f"params/{BIAS}" in finding.unchecked
    own = replace(evidence(), captured=(localize({"act/my_module": torch.ones(2)}),) * 2)
    assert examine(own, COVERAGE)["coverage"].verdict == PASS, "a module of its own"


@pytest.mark.parametrize("returned", [{}, {"my_loss": torch.ones(())}])
def test_a_subject_that_returns_nothing_checkable_fails(returned: dict[str, Any]) -> None:
    findings = examine(evidence(returned, returned))
    assert findings["coverage"].verdict == FAIL
    assert findings["coverage"].message.startswith("nothing checkable: it returned")
    assert not {"forward", "update"} & named(findings, PASS)


def test_a_layout_flaw_is_said_before_numbers_and_keeps_the_tensor_out_of_them() -> None:
    first, second = (outcome_of(rank, truth()) for rank in range(2))
    second[f"grad/{W1}"] = first[f"grad/{W1}"]
    findings = examine(evidence(first, second))
    assert named(findings, FAIL) == {"merge"}
    assert "omission" in findings["merge"].message
    assert f"grad/{W1} (has a flaw)" in findings["parameter_gradients"].unchecked
    assert findings["parameter_gradients"].decided["grad"] == (4, 4), "it is found wrong"
    assert findings["replicas"].unchecked == (f"grad/{W1}",)


def test_runs_that_differ_without_recording_are_not_deterministic() -> None:
    other = [outcome_of(rank, {**truth(), "loss/0": truth()["loss/0"] + 1e-15}) for rank in range(2)]
    third = [outcome_of(rank, {**truth(), "loss/0": truth()["loss/0"] + 2e-15}) for rank in range(2)]
    shaky = evidence(repeat=other)
    assert named(examine(shaky), FAIL) == {"determinism"}
    shaky = replace(shaky, repeats=(*shaky.repeats, [localize(rank) for rank in third]))
    findings = examine(shaky)
    assert named(findings, FAIL) == {"determinism"}
    words = "loss/0 on rank 0 differs between two runs of the same case: in 1"
    assert findings["determinism"].message.startswith(words)
    fewer = [outcome_of(rank, {k: v for k, v in truth().items() if k != "loss/1"}) for rank in range(2)]
    alone = examine(evidence(repeat=fewer))["determinism"]
    assert alone.verdict == FAIL and alone.message.endswith("only one of the runs returned it")


def test_a_split_that_moves_nothing_fails_although_every_number_is_right() -> None:
    findings = examine(evidence(events=(), expectation=None))
    assert named(findings, FAIL) == {"parallelism"}
    assert findings["parallelism"].message == "no rank sent or received anything in a mesh of tp=2"
    one_sided = tuple(event for event in events() if event.rank == 0)
    assert examine(evidence(events=one_sided, expectation=None))["parallelism"].ranks == (1,)
    alone = tuple(replace(event, group_size=1) for event in events())
    assert examine(evidence(events=alone, expectation=None))["parallelism"].verdict == FAIL
    one = examine(evidence(truth(), case=case("mode=tp tp=1"), events=(), expectation=None))
    assert "parallelism" not in one and not named(one, FAIL), "one rank has none to prove"


def test_ranks_that_hold_everything_in_full_fail_although_they_talk_where_an_axis_splits_weights() -> None:
    """mode=isp tp=2 wp=1 has whole weights on every rank, and is right; tp=2 wp=2 has not."""
    findings = examine(evidence(whole(), whole()))
    assert named(findings, FAIL) == {"parallelism"}
    assert "every rank holds the full tensor of all 4 shards" in findings["parallelism"].message
    assert "parallelism" in named(examine(evidence(whole(), whole(), case=case("mode=isp tp=2 wp=2"))), FAIL)
    finding = examine(evidence(whole(), whole(), case=case("mode=isp tp=2 wp=1")))["parallelism"]
    assert finding.verdict == PASS and finding.message.endswith("; no axis of it splits weights")
    finding = examine(evidence(truth(), truth()))["parallelism"]
    assert (finding.verdict, finding.unchecked) == (PASS, ("local shapes: every tensor was returned in full",))


def test_the_share_of_the_parameters_that_is_split_is_of_their_elements() -> None:
    def outcomes(*held: tuple[str, tuple[int, int], bool]) -> list[Mapping[str, tuple[Block, ...]]]:
        """Of two ranks that hold these names in these shapes, split or whole."""
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
    finding = examine(evidence(unwaited=tuple(replace(work, number=number) for number in range(3))))["waits"]
    assert finding.verdict == FAIL and finding.ranks == (1,)
    assert finding.message == "all_gather #0 of tp (0 1) at model.py:9 in forward was never waited for; 2 more like it"
    started = tuple(replace(event, is_async=True) for event in events())
    assert examine(evidence(events=started))["waits"].verdict == PASS
    assert "waits" not in examine(evidence())


def test_an_exception_inside_a_check_is_unknown_with_its_text() -> None:
    def broken(_: Evidence) -> Finding:
        raise ZeroDivisionError("no such thing")

    findings = examine(evidence(), {"broken": broken, "merge": CHECKS["merge"]})
    assert findings["broken"].verdict == UNKNOWN
    assert findings["broken"].message == "the check itself failed: ZeroDivisionError: no such thing"
    assert findings["merge"].verdict == PASS


def test_captured_activations_are_checked_like_returned_ones() -> None:
    returned = {name: tensor for name, tensor in truth().items() if not name.startswith("act")}
    captured = [localize({name: truth()[name] for name in truth() if name.startswith("act")}) for _ in range(2)]
    ranks = tuple(outcome_of(rank, returned) for rank in range(2))
    assert not {"activations", "activation_gradients"} & set(examine(evidence(*ranks)))
    findings = examine(evidence(*ranks, captured=captured))
    assert named(findings, PASS) == ASKED
    captured[1] = localize({name: truth()[name] * 2 for name in truth() if name.startswith("act/")})
    assert named(examine(evidence(*ranks, captured=captured)), FAIL) == {"merge", "replicas"}
