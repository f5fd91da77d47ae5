"""How many tensors a verdict decides, by kind: what counts as decided, and a kind of which nothing is decided."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from harness.checking.coverage import coverage
from harness.checking.evidence import PASS, UNKNOWN, Evidence
from harness.checking.numeric_checks import numeric
from tests.harness.toy_evidence import evidence, outcome_of, truth

EXPERTS = [f"grad/experts.{number}.weight" for number in range(15)]
OTHERS = [f"grad/layers.{number}.weight" for number in range(8)]


def gradients(names: list[str]) -> dict[str, Tensor]:
    """A gradient of each name."""
    return {name: 1 + torch.rand(6, generator=torch.Generator().manual_seed(len(name))).double() for name in names}


def in_bfloat16(true: dict[str, Tensor], undecided: list[str], returned: dict[str, Tensor], **more: Any) -> Evidence:
    """Evidence of a case in bfloat16 in which a control run is far from the truth for these names."""
    case = evidence().case.but(dtype="bfloat16")
    control = {name: -tensor if name in undecided else tensor for name, tensor in true.items()}
    ranks = [outcome_of(rank, returned) for rank in range(2)]
    return evidence(*ranks, truth=true, case=case, controls=(control,), **more)


def test_a_wrong_gradient_that_rounding_may_explain_is_not_decided_and_the_verdict_says_so() -> None:
    true = gradients([*EXPERTS, *OTHERS])
    returned = {**true, EXPERTS[3]: 1.2 * true[EXPERTS[3]]}
    found = numeric("parameter_gradients")(in_bfloat16(true, EXPERTS, returned))
    assert found is not None and found.verdict == PASS
    assert found.decided == {"grad": (8, 23)}
    assert set(found.unchecked) == set(EXPERTS)


def test_what_is_wrong_is_decided() -> None:
    true = gradients(OTHERS)
    found = numeric("parameter_gradients")(in_bfloat16(true, [], {**true, OTHERS[0]: 2 * true[OTHERS[0]]}))
    assert found is not None and found.decided == {"grad": (8, 8)}


def test_a_kind_with_no_decided_tensor_is_unknown_beside_kinds_that_are_decided() -> None:
    true = {name: tensor for name, tensor in truth().items() if name.startswith(("loss/", "logits/"))}
    found = numeric("forward")(in_bfloat16(true, ["logits/0", "logits/1"], true))
    assert found is not None and found.verdict == UNKNOWN
    assert found.message == (
        "no tensor of the logits could be compared: rounding alone explains any error; first: logits/0"
    )
    assert found.decided == {"loss": (2, 2), "logits": (0, 2)}
    whole = numeric("forward")(in_bfloat16(true, ["logits/1"], true))
    assert whole is not None and (whole.verdict, whole.decided["logits"]) == (PASS, (1, 2))


def test_what_is_left_out_on_purpose_and_what_is_never_returned_counts_among_all() -> None:
    true = truth()
    returned = {name: tensor for name, tensor in true.items() if not name.startswith(("act", "logits"))}
    left_out = returned.pop("grad/layers.0.mlp.w2.bias")
    assert left_out is not None
    seen = evidence(*(outcome_of(rank, returned) for rank in range(2)), declared=("grad/*.bias",))
    found = numeric("parameter_gradients")(seen)
    assert found is not None and found.decided == {"grad": (3, 4)}
    assert coverage(seen).decided == {"logits": (0, 2), "act": (0, 5), "act_grad": (0, 5)}
    forward = numeric("forward")(seen)
    assert forward is not None and (forward.verdict, forward.decided) == (PASS, {"loss": (2, 2)}), "none was returned"


def test_a_tensor_that_is_zero_but_for_rounding_is_decided_since_any_other_value_is_wrong() -> None:
    true = gradients(OTHERS) | {"grad/key.bias": torch.full((6,), 1e-17, dtype=torch.float64)}

    def judged(value: float) -> tuple[str, tuple[int, int]]:
        returned = {**true, "grad/key.bias": torch.full((6,), value, dtype=torch.float64)}
        found = numeric("parameter_gradients")(evidence(*(outcome_of(rank, returned) for rank in range(2)), truth=true))
        assert found is not None
        return found.verdict, found.decided["grad"]

    assert judged(-3e-17) == (PASS, (9, 9))
    assert judged(1e-3) == ("fail", (9, 9))
