"""The first place where it went wrong, and the causes that a ledger tells."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.checking.checks import examine
from harness.checking.evidence import Evidence
from harness.diagnosing.diagnosis import First, diagnose
from harness.diagnosing.first import first_place
from harness.diagnosing.rules.places import place_of, timeline
from harness.diagnosing.six_lines import explain
from tests.harness.toy_evidence import TERMS, altered, events, evidence, outcome_of, truth, without

W1 = "grad/layers.0.mlp.w1.weight"


def planted(**wrong: Tensor) -> Evidence:
    values = {**truth(), **wrong}
    return evidence(*(outcome_of(rank, values) for rank in range(2)))


@pytest.mark.parametrize(
    ("wrong", "first"),
    [
        (
            ["act/layers.0.mlp.w2", "act/layers.0.mlp", "act/head", "loss/0", W1],
            "forward of layers.0.mlp.w2 in step 0: act/layers.0.mlp.w2",
        ),
        (
            ["act_grad/layers.0.mlp.w1", "act_grad/embedding", W1, "loss/1"],
            "backward of layers.0.mlp in step 0: act_grad/layers.0.mlp.w1",
        ),
        ([W1, "param/layers.0.mlp.w1.weight"], f"backward of layers.0.mlp.w1 in step 0: {W1}"),
        (["grad/embedding.tokens.weight", W1], f"backward of head in step 0: {W1}"),
        (["loss/1", "param/layers.0.mlp.w1.weight"], "loss in step 1: loss/1"),
        (["param/layers.0.mlp.w1.weight"], "step of layers.0.mlp.w1 in step 1: param/layers.0.mlp.w1.weight"),
    ],
)
def test_the_first_wrong_place_is_the_first_that_training_computes(wrong: list[str], first: str) -> None:
    seen = planted(**{name: truth()[name] + 1 for name in wrong})
    findings = examine(seen)
    check = next(name for name, finding in findings.items() if finding.verdict == "fail")
    assert (
        explain(seen, findings, check, "my.module:subject").splitlines()[3].partition("; between ")[0]
        == f"first:  {first}"
    )


@pytest.mark.parametrize(("width", "region"), [(12, "layers.0.attention"), (6, "layers.0.attention.q_norm")])
def test_what_several_modules_take_parts_of_is_of_the_code_around_them(width: int, region: str) -> None:
    """A norm of queries takes a part of what a fused projection returns: the values go another way."""
    widths = {"wqkv": (width, 2), "q_norm": (6, 1), "wo": (6, 2)}
    at = "layers.0.attention"
    true = {f"act/{at}.{leaf}": torch.ones(2, 3, size) for leaf, (size, _) in widths.items()}
    true |= {f"act/{at}": torch.ones(2, 3, 6)}
    true |= {f"act_grad/{at}.{leaf}": torch.ones(2, 3, size) for leaf, (size, _) in widths.items()}
    true |= {f"grad/{at}.{leaf}.weight": torch.ones([6] * dims) for leaf, (_, dims) in widths.items()}
    seen = evidence(truth=true)
    assert first_place(seen, [f"act_grad/{at}.wqkv"], None).region == region


def first_of(seen: Evidence, check: str) -> First:
    return diagnose(seen, examine(seen), check).first


def test_the_earlier_of_tensor_and_event_is_the_first_place() -> None:
    grad, lost = planted(**{W1: truth()[W1] * 2}), without(events(), phase="backward", region="head")
    both = replace(grad, events=lost)
    assert first_of(grad, "parameter_gradients").region == "layers.0.mlp.w1"
    first = first_of(both, "parameter_gradients")  # a gradient may be wrong because of a call in backward
    assert (first.phase, first.region, first.name) == ("backward", "head", W1)
    act = planted(**{"act/head": truth()["act/head"] * 2})
    first = first_of(replace(act, events=lost), "activations")  # what backward lacks did not make an activation wrong
    assert (first.phase, first.region, first.name) == ("forward", "head", "act/head")
    assert first.event.startswith("missing event in backward of head")


def test_a_diagnosis_is_a_value() -> None:
    seen = planted(**{W1: truth()[W1] * 2})
    found = diagnose(seen, examine(seen), "parameter_gradients")
    assert (found.check, found.name, found.ranks, found.step) == ("parameter_gradients", W1, (), 0)
    assert (found.phase, found.region) == ("backward", "layers.0.mlp.w1")
    assert found.first == First(phase="backward", region="layers.0.mlp.w1", step=0, name=W1)
    assert [cause.id for cause in found.causes] == ["constant_factor"]


@pytest.mark.parametrize(
    ("wrong", "cause"),
    [
        ({"axis": "dp"}, "wrong_group"),
        ({"op": "all_gather", "reduce_op": ""}, "wrong_op"),
        ({"reduce_op": "avg"}, "averaged"),
        ({"reduce_op": "max"}, "wrong_op"),
        ({"payload_bytes": 8}, "wrong_payload"),
        ({"dtype": "float32"}, "wrong_payload"),
        ({"region": "head"}, "wrong_place"),
    ],
)
def test_a_call_made_otherwise_has_a_cause(wrong: dict[str, Any], cause: str) -> None:
    seen = evidence(events=altered(events(), 0, **wrong))
    assert [told.id for told in diagnose(seen, examine(seen), "ledger").causes] == [cause]
    for lost, known in (
        (without(events(), region="head"), "missing_call"),
        (events() + events(TERMS[:1]), "extra_call"),
    ):
        seen = evidence(events=lost)
        assert [told.id for told in diagnose(seen, examine(seen), "ledger").causes] == [known]


def test_what_is_sent_in_a_shorter_dtype_is_told_by_its_call() -> None:
    """The ledger names the call that rounds; where numbers of that dtype entered arithmetic follows from it."""
    called = altered(events(), 0, dtype="float32", payload_bytes=192)
    seen = replace(planted(**{W1: truth()[W1] * 2}), events=called, island="float32, which enters at model.py:7")
    assert [told.id for told in diagnose(seen, examine(seen), "ledger").causes] == ["wrong_payload"]
    seen = replace(seen, events=events())
    assert [told.id for told in diagnose(seen, examine(seen), "parameter_gradients").causes] == ["shorter_dtype"]


def test_names_stand_in_training_order() -> None:
    assert timeline(
        ["param/a", "grad/a", "grad/b", "loss/1", "loss/0", "act/a", "act_grad/a", "act_grad/b", "odd"], 2
    ) == [*("act/a", "loss/0", "act_grad/b", "act_grad/a", "grad/b", "grad/a", "loss/1", "param/a", "odd")]
    place = place_of("grad/layers.0.mlp.w1.weight", 3)
    assert (place.step, place.phase, place.module) == (0, "backward", "layers.0.mlp.w1")
    assert place_of("param/head.weight", 3).step == 2
    assert place_of("grad_norm/2", 3).step == 2
