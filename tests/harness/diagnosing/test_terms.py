"""Terms, parts and dtypes: what a wrong tensor is made of, and nothing where several makings fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.checking.checks import examine
from harness.checking.evidence import Evidence
from harness.diagnosing.diagnosis import explained
from harness.diagnosing.rules.norms import from_norms
from harness.diagnosing.rules.patterns import rounded
from harness.diagnosing.rules.regions import from_regions
from harness.diagnosing.rules.sums import from_counts
from harness.diagnosing.rules.terms import from_terms
from harness.engines.engine import Unwaited
from harness.outcome.blocks import localize
from harness.shard import Shard
from tests.harness.toy_evidence import TERMS, Term, case, events, evidence, outcome_of, truth

LINEAR, TABLE = "act/layers.0.mlp.w2", "act/embedding"
OUTER, INNER = "act/layers.0.mlp", "act/layers.0.mlp.w1"
ONE = case("mode=tp tp=2 seq=16 micro=1")


def drawn(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


BIAS, POSITIONS = drawn(6), drawn(3, 6)
STARTS = {"start/layers.0.mlp.w2.bias": BIAS, "start/embedding.positions.weight": POSITIONS}


def seen_with(values: Mapping[str, Tensor], **changes: Any) -> Evidence:
    fields: dict[str, Any] = {"shares": STARTS, "case": ONE, **changes}
    return evidence(*(outcome_of(rank, {**truth(), **values}) for rank in range(2)), **fields)


def told(name: str, rest: float, term: float) -> list[str]:
    """Ids when the module's own term counts so often in its output, and the rest of it so often."""
    own = BIAS if name == LINEAR else POSITIONS
    seen = seen_with({name: rest * (truth()[name] - own) + term * own})
    return [cause.id for cause in from_terms(seen, name)]


@pytest.mark.parametrize(
    ("name", "rest", "term", "ids"),
    [
        (LINEAR, 1.0, 0.0, ["bias_missing"]),
        (LINEAR, 1.0, 2.0, ["bias_per_rank"]),
        (LINEAR, 1.0, 1.7, ["constant_factor"]),
        (LINEAR, 0.5, 1.0, ["averaged"]),
        (LINEAR, 2.0, 1.0, ["summed_twice"]),
        (LINEAR, 1.7, 1.0, ["constant_factor"]),
        (LINEAR, 1.7, 0.0, []),  # two terms at once are two bugs
        (TABLE, 1.0, 0.0, ["term_missing"]),
        (TABLE, 1.0, 2.0, ["bias_per_rank"]),
        (TABLE, 2.8, 1.0, ["constant_factor"]),
    ],
)
def test_the_term_that_does_not_count_once_is_told(name: str, rest: float, term: float, ids: list[str]) -> None:
    assert told(name, rest, term) == ids


def test_a_sum_without_one_of_its_terms_is_told_by_the_names_of_both() -> None:
    for name, value in (
        (OUTER, truth()[INNER]),  # an inner module alone: what goes past it is lost
        (OUTER, truth()[OUTER] - truth()[TABLE]),
        ("act_grad/embedding", truth()["act_grad/head"]),
        ("act_grad/embedding", truth()["act_grad/embedding"] - truth()["act_grad/head"]),
    ):
        (cause,) = from_terms(seen_with({name: value}), name)
        assert cause.id == "term_missing"
    assert from_terms(seen_with({OUTER: truth()[TABLE]}), OUTER) == []  # another module's output is no term
    assert from_terms(seen_with({OUTER: drawn(2, 3, 6)}), OUTER) == []


def test_places_are_looked_at_beside_what_a_module_adds_itself() -> None:
    rest = truth()[TABLE] - POSITIONS
    seen = seen_with({TABLE: rest.roll(3, 2) + POSITIONS})
    assert [cause.id for cause in explained(seen, examine(seen)).causes] == ["shifted_shard"]


def test_numbers_that_are_not_finite_are_explained_by_no_what_if() -> None:
    name = "grad/layers.0.mlp.w1.weight"
    seen = seen_with({name: truth()[name] / 0}, alternatives={f"mask_ignored/{name}": truth()[name] * 2})
    assert [cause.id for cause in explained(seen, examine(seen)).causes] == ["nan"]


def test_numbers_of_a_shorter_dtype_are_told() -> None:
    right = drawn(8, 4)
    for short in (torch.float32, torch.bfloat16, torch.float16):
        (cause,) = rounded(right.to(short).double(), right)
        assert cause.id == "shorter_dtype" and str(short).removeprefix("torch.") in cause.words
    assert rounded(right.bfloat16(), right) == []  # the run's own dtype
    assert rounded(right.float().double(), right.float().double()) == []  # as the truth itself
    assert rounded(right.bfloat16().double() * 2, right) == []
    assert rounded(right[0].bfloat16().double()[:4], right[0][:4]) == []  # too few to be none by chance


def parts_of(name: str, full: Tensor, starts: tuple[int, ...], places: tuple[int, ...]) -> Evidence:
    """Ranks that hold columns of a tensor from these starts, and in them the numbers of these places."""
    outcomes: list[Mapping[str, Any]] = []
    for start, place in zip(starts, places, strict=True):
        size = min(starts[1], full.shape[1] - start)
        local = torch.nn.functional.pad(full, (0, size))[:, place : place + size]
        outcomes.append(localize({name: Shard(local, (0, start), tuple(full.shape))}))
    return replace(seen_with({}), outcomes=outcomes, truth={name: full})


def test_a_part_that_holds_another_place_is_told_also_when_parts_are_unequal() -> None:
    full = drawn(4, 7)
    (cause,) = from_regions(parts_of("grad/x", full, (0, 4), (0, 0)), "grad/x")
    assert cause.id == "other_shard" and "rank 1 holds what lies at 0, where 4 is meant" in cause.words
    assert from_regions(parts_of("grad/x", full, (0, 4), (0, 4)), "grad/x") == []
    assert from_regions(parts_of("grad/x", full, (0, 4), (0, 1)), "grad/x") == []  # no part begins there


def test_norms_of_another_kind_are_told() -> None:
    gradients = {name: tensor for name, tensor in truth().items() if name.startswith("grad/")}
    parts = [tensor.norm() for tensor in gradients.values()]
    right = torch.stack(parts).norm()
    true = {**truth(), "grad_norm/0": right}

    def of(value: Tensor, text: str = "mode=tp tp=2 seq=16") -> list[str]:
        ranks = (outcome_of(rank, {**true, "grad_norm/0": value}) for rank in range(2))
        return [cause.id for cause in from_norms(evidence(*ranks, truth=true, case=case(text)), "grad_norm/0")]

    every = torch.cat([tensor.flatten() for tensor in gradients.values()])
    for other in (right**2, every.abs().max(), every.abs().sum(), torch.stack(parts).max(), right / len(every) ** 0.5):
        assert of(other) == ["norm_kind"]
    assert of(torch.stack(parts).sum()) == ["norm_of_norms"]
    assert of((right**2 + parts[0] ** 2).sqrt()) == ["norm_counts_replicas"]
    assert of(torch.tensor(0.5, dtype=torch.float64), "mode=tp tp=2 seq=16 clip=0.5") == ["norm_after_clip"]
    assert of(torch.tensor(0.5, dtype=torch.float64)) == []
    assert of(right * 1.01) == []


def test_numbers_of_tokens_are_told_where_one_rule_alone_fits() -> None:
    grid = torch.tensor([[30.0, 50.0], [40.0, 80.0]], dtype=torch.float64)
    text, true = case("mode=tp tp=2 dp=2 seq=16"), {**truth(), "tokens/0": torch.tensor(200)}

    def of(value: int, tokens: Tensor = grid) -> list[str]:
        ranks = (outcome_of(rank % 2, {**true, "tokens/0": torch.tensor(value)}) for rank in range(4))
        seen = evidence(*ranks, truth=true, case=text, shares={"tokens": tokens})
        return [cause.id for cause in from_counts(seen, "tokens/0")]

    assert of(130) == of(120) == of(80) == ["micro_missing"]
    assert of(4 * 3) == ["constant_factor"]  # all tokens of the logits
    assert of(199) == []
    assert of(12, torch.tensor([[4.0, 8.0], [80.0, 108.0]])) == []  # all tokens, or those of one data rank


def test_calls_too_many_that_nobody_waits_for_are_told_as_calls_too_many() -> None:
    """The handle of a call that is not needed at all is no one's to wait for."""
    extra = Term(phase="backward", region="head", op="all_gather", reduce_op="")
    ledger = events((*TERMS, extra))
    work = Unwaited(rank=0, op="all_gather", group="tp (0 1)", number=0, caller="model.py:7")
    seen = seen_with({}, events=ledger, unwaited=(work,))
    assert [cause.id for cause in explained(seen, examine(seen)).causes] == ["extra_call"]
    seen = seen_with({}, unwaited=(work,))
    assert [cause.id for cause in explained(seen, examine(seen)).causes] == ["not_waited"]
