"""No cause is reported that its own numbers contradict: on evidence where one was, and on random evidence."""

import ast
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shardproof.harness.checking.checks import run_checks
from shardproof.harness.checking.records import Evidence
from shardproof.harness.diagnosing.causes import ranking
from shardproof.harness.diagnosing.causes.cause import Cause, claim_cause
from shardproof.harness.diagnosing.causes.proofs import Explained, NotFinite, Rounded
from shardproof.harness.diagnosing.diagnosis import explanation_of
from shardproof.harness.diagnosing.hypotheses.patterns import from_patterns
from shardproof.harness.diagnosing.rank_causes import by_numbers
from shardproof.harness.protocols import Shard
from shardproof.harness.verdicts.facts import state_text
from shardproof.harness.verdicts.sentences.formats import describe_factor
from tests import ROOT
from tests.harness.toy_evidence import case, drawn, evidence, ids_of, outcome_of, planted, truth

ALONE = case("mode=tp tp=2 seq=16 micro=1 dtype=float32")
MASK = "mask/0/embedding"
ROWS = {"q": 12, "k": 6, "v": 6}
Values = dict[str, Tensor]


def seen(values: Values, true: Values | None = None, text: Any = ALONE) -> Evidence:
    """Evidence of two ranks that return these values in float32, everything else right."""
    known = {**truth(), **(true or {})}
    short = {n: t.float() if t.is_floating_point() else t for n, t in {**known, **values}.items()}
    return planted(short, truth=known, case=text)


def words_of(found: list[Cause]) -> list[str]:
    return [cause.words for cause in found]


def test_no_cause_guesses() -> None:
    """An example or a supposition in a message says more than the numbers and calls show."""
    sources = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "harness/diagnosing").rglob("*.py")}
    texts = {
        (name, node.value)
        for name, source in sources.items()
        for node in (ast.walk(ast.parse(source)) if "diagnosing.causes" in source else ())
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and not node.value.rstrip().endswith(".")
    }
    assert len(texts) > 200
    supposed = re.compile(r"such as|probabl|perhaps|possibl|e\.g\.|usual|likely|uninitiali|might|may be")
    assert [text for text in texts if supposed.search(text[1])] == []


def test_a_factor_near_1_is_told_with_the_digits_that_tell_it_from_1() -> None:
    """Two numbers that are off by different shares have none, though both factors print as 1 in float32.

    They are nearer to each other than to what rounding leaves of a number.
    """
    values = {f"loss/{step}": truth()[f"loss/{step}"] * factor for step, factor in ((0, 1.0001), (1, 1.0003))}
    assert by_numbers(seen(values), ["loss/0", "loss/1"]) == []
    name = "act/layers.0.mlp.w2"
    (told,) = words_of(by_numbers(seen({name: truth()[name] * 1.0002}), [name]))
    assert told == "it is 1.0002 x the truth"
    in_words = {2.0: "2 x", 1 / 3: "0.3333 x", -1.0: "-1 x", 1 - 2e-7: "0.9999998 x", 1.05: "1.05 x", 1 - 2**-52: "1 x"}
    assert {f: describe_factor(f) for f in in_words} == in_words


def test_a_count_of_steps_is_no_mean_and_is_not_left_at_zero() -> None:
    """Half as many steps as tp=2 would make of them: one small whole number is half of another by chance."""
    mean, zero = "saved/step_after/1/layers.0.mlp.w2.bias", "saved/steps"
    assert by_numbers(seen({mean: torch.tensor(1.0)}, {mean: torch.tensor(2.0).double()}), [mean]) == []
    assert by_numbers(seen({zero: torch.tensor(0)}, {zero: torch.tensor(1)}), [zero]) == []


def test_initial_values_of_another_rank_are_told_and_masks_are_no_parts() -> None:
    table = "init/embedding.tokens.weight"
    for name, kept in ((table, truth()[table]), (MASK, drawn(8, 6) > 0)):
        found = words_of(by_numbers(seen({name: torch.cat([kept.chunk(2)[0]] * 2)}, {name: kept}), [name]))
        words = "initial values, before any step: along dim 0 it holds the wrong parts of 2 (tp): 0 in place of 1"
        assert found == ([words] if name == table else [])


def test_an_activation_of_one_data_rank_is_a_place_and_no_cause() -> None:
    name, true = "act/layers.0.mlp.w2", drawn(4, 3, 6)
    parts = [true[:2], drawn(2, 3, 6, seed=9)]
    shards = [Shard(part, (2 * rank, 0, 0), (4, 3, 6)) for rank, part in enumerate(parts)]
    ranks = (outcome_of(rank, truth()) | {name: shard} for rank, shard in enumerate(shards))
    found = evidence(*ranks, truth={**truth(), name: true}, case=case("mode=tp tp=1 dp=2 seq=16 micro=1"))
    assert by_numbers(found, [name]) == []


def test_rows_that_are_routed_in_other_groups_are_no_wrong_layout() -> None:
    """Tokens sorted by their expert, over all of them in truth and by data rank here."""
    rows, expert = drawn(64, 4), drawn(64).mul(100).long() % 4
    by_rank = torch.cat([expert[:32].argsort(stable=True), 32 + expert[32:].argsort(stable=True)])
    (told,) = words_of(from_patterns(rows[by_rank], rows[expert.argsort(stable=True)], {}, {}))
    assert told == "along dim 0 it holds the right rows in another order"

    # Which expert a token goes to, as a row of one 1: any other routing with as many tokens is a permutation.
    one, other = (torch.eye(4).double()[drawn(64).roll(by).mul(100).long() % 4] for by in (0, 5))
    assert from_patterns(other, one, {}, {}) == []


SERVED = {
    f"served/{step}/{name}": drawn(rows, 5, seed=10 * step + number)
    for step in (0, 1)
    for number, (name, rows) in enumerate(ROWS.items())
}


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (SERVED["served/1/v"], "it equals served/1/v of the dense model"),
        (SERVED["served/0/k"], "it equals served/0/k of the dense model"),
        (
            torch.cat([SERVED["served/1/q"][9:], SERVED["served/1/v"][:3]]),
            "along dim 0 it holds slices of served/1/q, served/1/v",
        ),
        (SERVED["served/1/k"] * torch.arange(1.0, 7.0).unsqueeze(1), None),
        (torch.cat([SERVED["served/1/k"][:3], torch.zeros(3, 5).double()]), None),
    ],
)
def test_a_tensor_of_another_name_or_step_or_made_of_several_is_told(value: Tensor, told: str | None) -> None:
    assert words_of(by_numbers(seen({"served/1/k": value}, SERVED), ["served/1/k"])) == ([told] if told else [])


def test_slices_that_most_others_are_like_are_no_other_tensors() -> None:
    first, second, wrong = (torch.eye(4).double()[drawn(64).roll(by).mul(100).long() % 4] for by in (0, 5, 9))
    routed = {"choice/0/first": first, "choice/0/second": second}
    assert by_numbers(seen({"choice/0/first": wrong}, routed), ["choice/0/first"]) == []


def test_a_state_of_a_kind_of_its_own_that_is_a_multiple_is_told() -> None:
    lost = {f"lost_after/0/{name}": drawn(4, 3, seed=seed) for seed, name in enumerate(("up", "down"), 3)}
    found = by_numbers(seen({"lost_after/0/up": -lost["lost_after/0/up"]}, lost), ["lost_after/0/up"])
    assert [(cause.id, cause.words) for cause in found] == [("constant_factor", "it is -1 x the truth")]


def test_a_cause_that_its_numbers_contradict_cannot_be_made() -> None:
    true = drawn(8, 4)
    double = Explained(value=true * 1.9, truth=true, guess=true * 2)
    assert claim_cause("size_factor", state_text("it is 2 x the truth"), double) == []
    for proof in ((double,), ()):
        with pytest.raises(ValueError, match="must hold of the numbers that it speaks of"):
            Cause(id="size_factor", fact=state_text("it is 2 x the truth"), proof=proof)


def test_a_factor_that_leaves_more_than_its_check_allows_is_not_told() -> None:
    """Twice the truth and one part in ten thousand more: float32 rounds no tensor so far off."""
    name, more = "grad/layers.0.mlp.w2.bias", 1e-4 * drawn(6)
    for extra, ids in ((0 * more, ["size_factor"]), (more, [])):
        assert ids_of(seen({name: 2 * truth()[name] + extra})) == ids


NAMED = (
    "act/layers.0.mlp.w2",
    "act_grad/layers.0.mlp.w1",
    "grad/layers.0.mlp.w1.weight",
    "grad/layers.0.mlp.w2.bias",
    "logits/0",
)
WRONGS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "a factor": lambda t, f: f * t,
    "a factor and noise": lambda t, f: f * t + 1e-3 * drawn(*t.shape),
    "half of it": lambda t, f: torch.cat([f * t[: len(t) // 2], t[len(t) // 2 :]]),
    "other rows": lambda t, f: t[torch.randperm(len(t), generator=torch.Generator().manual_seed(int(1e3 * abs(f))))],
    "shifted": lambda t, f: t.roll(len(t) // 2, 0),
    "rounded": lambda t, f: t.bfloat16().to(t.dtype),
    "rounded and scaled": lambda t, f: f * t.bfloat16().to(t.dtype),
    "exchanged dims": lambda t, f: t.transpose(0, -1).reshape(t.shape),
    "one vector more": lambda t, f: t + f * drawn(t.shape[-1]),
    "zero": lambda t, f: 0 * t,
    "not finite": lambda t, f: t / (t > 0),
    "noise": lambda t, f: f * drawn(*t.shape),
}
FACTORS = st.one_of(
    st.sampled_from([0.25, 0.5, 2.0, 4.0, -1.0, 3.0, 1 / 3, 1.0001, 0.999]),
    st.floats(-3, 3).filter(lambda f: abs(f) > 1e-3),
)


@given(
    st.lists(st.sampled_from(NAMED), min_size=1, max_size=3, unique=True),
    st.sampled_from(sorted(WRONGS)),
    st.lists(FACTORS, min_size=3, max_size=3),
    st.sampled_from(["float64", "float32"]),
    st.booleans(),
)
def test_no_cause_contradicts_the_numbers_of_random_evidence(
    names: list[str], wrong: str, factors: list[float], dtype: str, alike: bool
) -> None:
    values = {n: WRONGS[wrong](truth()[n], factors[0 if alike else i]) for i, n in enumerate(names)}
    text = case(f"mode=tp tp=2 seq=16 micro=1 dtype={dtype}")
    found = seen(values, text=text) if dtype == "float32" else planted(values, case=text)
    for cause in explanation_of(found, run_checks(found)).causes:
        contradicted(cause, found, values)


def contradicted(cause: Cause, found: Evidence, values: Values) -> None:
    """Asserts that this cause speaks of tensors of the evidence, and that they are as its words and predictions say."""
    true = [t.double().flatten() for t in found.truth.tensors.values() if t.is_floating_point()]
    for proof in cause.proof:
        if isinstance(proof, Explained):
            error, left = (float((proof.value.double() - t.double()).norm()) for t in (proof.truth, proof.guess))
            assert left <= 0.1 * error, cause.words
            assert any(torch.equal(proof.truth.double().flatten(), t) for t in true) or "partial sum" in cause.words
        if isinstance(proof, Rounded):
            assert float((proof.value.double() - proof.truth.double()).norm()) <= 0.2 * float(proof.truth.norm())
        if isinstance(proof, NotFinite):
            assert not bool(torch.isfinite(proof.value).all()), cause.words
    if factor := re.search(r"(it is|all are) (\S+) x the truth", cause.words):
        number = float(factor[2])
        assert number != 1, cause.words
        spoken = values if factor[1] == "all are" else {found_first(cause, found): Tensor()}
        for name in spoken:
            x, t = found.run.tensors[name].double(), found.truth.tensors[name].double()
            assert float((x - number * t).norm()) <= 0.1 * float((x - t).norm()), cause.words
        assert cause.id != "size_factor" or abs(number) in (0.25, 0.5, 2.0, 4.0), cause.words  # of tp=2 alone


def found_first(cause: Cause, found: Evidence) -> str:
    """The tensor that a cause of one tensor speaks of."""
    (proof,) = cause.proof
    assert isinstance(proof, Explained)
    return next(name for name, tensor in found.run.tensors.items() if torch.equal(tensor, proof.value))


def test_the_property_fails_where_predictions_are_not_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: every prediction is taken to hold, and to leave nothing. No factor explains noise."""
    values = {NAMED[0]: truth()[NAMED[0]] + drawn(2, 3, 6)}
    found = planted(values)
    assert not explanation_of(found, run_checks(found)).causes
    monkeypatch.setattr(Explained, "holds", True)
    monkeypatch.setattr(ranking, "within_limits", lambda evidence, causes: [*causes])
    (cause, *_) = explanation_of(found, run_checks(found)).causes
    with pytest.raises(AssertionError):
        contradicted(cause, found, values)
