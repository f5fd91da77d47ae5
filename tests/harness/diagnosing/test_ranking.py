"""Hypotheses compete by what they explain, whatever order they stand in."""

import ast
import re
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from shardproof.harness.checking.records import Evidence
from shardproof.harness.diagnosing import rank_causes
from shardproof.harness.diagnosing.causes.cause import Cause, claim_cause  # noqa: F401  (the example of a page uses it)
from shardproof.harness.diagnosing.causes.hypothesis import Failure, Hypothesis, of_values
from shardproof.harness.diagnosing.causes.proofs import Explained
from shardproof.harness.diagnosing.causes.ranking import select_best
from shardproof.harness.verdicts.facts import state_fact, state_text  # noqa: F401  (the example of a page uses it)
from shardproof.harness.verdicts.sentences.rendering import SENTENCES
from tests import ROOT
from tests.harness.toy_evidence import case, drawn, planted, truth

LINEAR, W1, W2 = "act/layers.0.mlp.w2", "grad/layers.0.mlp.w1.weight", "grad/layers.0.mlp.w2.weight"
RIGHT, GRADIENTS = truth(), frozenset({"grad"})


def failure_of(values: dict[str, Tensor], text: str = "mode=tp tp=2 seq=16 micro=1") -> Failure:
    return Failure(evidence=planted(values, case=case(text)), wrong=[*values], numbers=[*values])


def toy(id: str, names: Sequence[str], fitted: int = 0, kinds: frozenset[str] = GRADIENTS) -> Hypothesis:
    """A hypothesis that always finds a cause, which explains these names by some of their numbers."""
    one = torch.ones(())
    proof = Explained(value=2 * one, truth=one, guess=2 * one, names=tuple(names), fitted=fitted)
    return Hypothesis(predicts="so", causes=lambda _: claim_cause(id, state_text("it is so"), proof), kinds=kinds)


def told(*hypotheses: Hypothesis) -> list[str]:
    failure = failure_of({W1: 2 * RIGHT[W1], W2: 2 * RIGHT[W2]})
    answers = [select_best(failure, order) for order in (hypotheses, hypotheses[::-1])]
    assert {cause.id for cause in answers[0]} == {cause.id for cause in answers[1]}
    return [cause.id for cause in answers[0]]


def test_what_explains_the_first_is_reported_then_what_explains_most_then_what_fits_least() -> None:
    assert told(toy("zero", [W1]), toy("stale", [W1, W2], fitted=3)) == ["stale"]
    assert told(toy("zero", [W1, "grad/right"]), toy("stale", [W1, W2])) == ["stale"]  # a right one counts for nothing
    assert told(toy("zero", [W2, "grad/a", "grad/b"]), toy("stale", [W1], fitted=3)) == ["stale"]
    assert told(toy("zero", [W1], fitted=2), toy("stale", [W1], fitted=1)) == ["stale"]
    assert told(toy("zero", [W1]), toy("stale", [W1])) == ["zero", "stale"]  # alternatives that fit equally well
    assert told(toy("zero", [W1]), toy("zero", [W1])) == ["zero"]
    assert told(toy("zero", [W1, W2], kinds=frozenset({"act"})), toy("stale", [W1])) == ["stale"]
    assert told(toy("zero", [W1, W2], kinds=frozenset({"act"}))) == []


def test_a_cause_that_leaves_more_than_the_check_allows_makes_room_for_another() -> None:
    value, true = RIGHT[W1] * 2 + 1e-8 * drawn(*RIGHT[W1].shape), RIGHT[W1]
    nearly = claim_cause(
        "size_factor", state_text("it is 2 x"), Explained(value=value, truth=true, guess=2 * true, names=(W1, W2))
    )
    assert nearly, "it explains nearly all of the error"
    everything = Hypothesis(predicts="twice the truth", causes=lambda _: nearly, kinds=GRADIENTS)
    failure = failure_of({W1: value, W2: 2 * RIGHT[W2]})
    assert [cause.id for cause in select_best(failure, (everything, toy("stale", [W1])))] == ["stale"]


def _nan_in_one_shard() -> dict[str, Tensor]:
    value = RIGHT[W1].clone()
    value[:4] = torch.nan
    return {W1: value}


@pytest.mark.parametrize(
    ("values", "ids"),
    [
        ({LINEAR: 2 * RIGHT[LINEAR]}, ["size_factor"]),
        ({W1: 3 * RIGHT[W1], W2: 3 * RIGHT[W2]}, ["constant_factor"]),
        ({W1: RIGHT[W1].roll(4, 0)}, ["other_part"]),
        ({W1: -RIGHT[W1]}, ["constant_factor"]),
        ({W1: torch.zeros_like(RIGHT[W1])}, ["zero"]),
        (_nan_in_one_shard(), ["nan"]),
        ({W1: torch.cat([drawn(4, 6, seed=3), RIGHT[W1][4:]])}, []),
        ({W1: drawn(8, 6, seed=3)}, []),
    ],
)
def test_the_order_of_hypotheses_decides_nothing(
    values: dict[str, Tensor], ids: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def causes(seen: Evidence) -> list[str]:
        return [cause.id for cause in rank_causes.by_numbers(seen, [*values])]

    seen = failure_of(values).evidence
    assert causes(seen) == ids
    monkeypatch.setattr(rank_causes, "HYPOTHESES", rank_causes.HYPOTHESES[::-1])
    assert causes(seen) == ids


def test_a_wrong_sum_of_micro_batches_is_told_by_gradients_and_not_by_one_activation() -> None:
    """The gradient of an activation is that of the first micro-batch: twice it, where the first counts twice."""
    gradient = "act_grad/head"
    shares = {W1: drawn(1, 2, 8, 6), "tokens": torch.tensor([[3.0, 5.0]]).double()}
    true = {W1: shares[W1].sum((0, 1)), gradient: drawn(4, 6)}
    values = {gradient: 2 * true[gradient], W1: true[W1] + shares[W1][0, 0]}
    seen = planted(values, truth={**RIGHT, **true}, shares=shares, case=case("mode=tp tp=2 seq=16 micro=2"))
    (cause,) = rank_causes.by_numbers(seen, [*values])
    assert cause.id == "unequal_shares" and cause.explains == {gradient, W1}


def test_every_hypothesis_states_what_it_predicts() -> None:
    sentences = [one.predicts for one in rank_causes.HYPOTHESES]
    assert len(set(sentences)) == len(sentences)
    assert all(3 <= len(sentence.split()) <= 25 and not sentence.endswith(".") for sentence in sentences)


def test_the_example_of_the_page_on_design_finds_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    code, sentence = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "negated" in block)
    monkeypatch.setitem(SENTENCES, "negated", ast.literal_eval(f"{{{sentence}}}")["negated"])
    made = {**globals(), "of_values": of_values}
    exec(code, made)  # noqa: S102  (a page of this project)
    (cause,) = select_best(failure_of({W1: -RIGHT[W1], W2: -RIGHT[W2]}), [made["NEGATED"]])
    assert cause.id == "constant_factor" and cause.explains == {W1, W2}
    assert cause.words == "they are minus the truth"


def test_odd_evidence_ends_in_no_cause_and_in_no_exception() -> None:
    norm, parameter = "grad_norm/0", "param/layers.0.mlp.w1.weight"
    start = {"start/layers.0.mlp.w1.weight": drawn(8, 6, seed=4)}
    clips = case("mode=tp tp=2 seq=16 micro=1 clip=0.5 steps=1")
    assert rank_causes.by_numbers(planted({norm: torch.tensor(1e200, dtype=torch.float64)}), [norm]) == []
    for slack in ({}, {parameter: torch.full((8, 6), 1.0).double()}):  # all of the update may be rounding
        seen = planted({parameter: RIGHT[parameter] + drawn(8, 6)}, shares=start, adam_bound=slack, case=clips)
        assert rank_causes.by_numbers(seen, [parameter]) == []
    without = {name: tensor for name, tensor in RIGHT.items() if name != W1}
    seen = planted({parameter: RIGHT[parameter] + drawn(8, 6)}, truth=without, shares=start)
    assert rank_causes.by_numbers(seen, [parameter]) == []
    bias = {"start/layers.0.mlp.w2.bias": drawn(6)}
    (cause,) = rank_causes.by_numbers(planted({LINEAR: RIGHT[LINEAR] * torch.nan}, shares=bias), [LINEAR])
    assert cause.id == "nan"


def test_a_stale_norm_of_a_later_step_is_told_by_the_nearest_step() -> None:
    """The states between the steps are not known here."""
    norms = {f"grad_norm/{step}": torch.tensor(float(max(step, 1) + 2)).double() for step in range(3)}
    seen = planted({"grad_norm/2": norms["grad_norm/1"]}, truth={**RIGHT, **norms})
    found = [(cause.id, cause.words) for cause in rank_causes.by_numbers(seen, ["grad_norm/2"])]
    assert found == [("stale", "it equals grad_norm/1 of the dense model")]
