"""A truth of the subject's own, or the subject on one rank: right ones pass, planted bugs fail. Cases in its own words.

The axes of experts have the rank lists of Megatron-Core.
"""

import itertools
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import shardproof
from shardproof.harness.engines.threads.dry import DryEngine
from shardproof.harness.engines.threads.inproc import InprocEngine
from shardproof.harness.errors import RequestError, ShardproofError
from shardproof.harness.plain_case import Vocabulary, WordError
from shardproof.harness.recording.capturing.operator_probes import NarrowProbe, Probed
from shardproof.harness.running.injecting import UNREAD, survey_faults
from shardproof.harness.running.ranks.execution import execute
from shardproof.harness.running.trials.law_runs import groupings
from shardproof.harness.running.truth.control_modes import partial_sums
from shardproof.harness.subject import Unanswered, case_of, domains_of, own_cases, refusal, resolve_subject
from tests.harness import own_words
from tests.harness.own_words import CASES, Network, doubled, subject
from tests.harness.proofs import failed, proved, verdict_of
from tests.harness.toy_subjects import Changed

OWN, SHORT = "tests.harness.own_words:subject", "tp=2 dp=3 micro=1 steps=1"


@pytest.mark.parametrize(
    ("case", "truth"), [(CASES[0], "alone"), (CASES[1], "tests.harness.own_words:truth"), (CASES[2], "")]
)
def test_a_right_subject_agrees_with_its_own_truth_and_with_itself(engine: InprocEngine, case: str, truth: str) -> None:
    assert failed(shardproof.prove(case, OWN, engine, truth=truth)) == set()


@pytest.mark.parametrize("case", CASES[1:])
def test_a_factor_in_the_loss_is_seen_beside_an_own_truth(case: str) -> None:
    result = proved(doubled, case)
    assert {"forward", "parameter_gradients", "update"} <= failed(result)
    assert all(len(verdict.message.splitlines()) == 6 for verdict in result.verdicts if verdict.verdict == "fail")


def test_alone_sees_what_only_several_ranks_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_words.Copied, "backward", staticmethod(lambda ctx, gradient: (gradient, None)))
    assert failed(proved(subject, SHORT, truth="alone")) == set(), "x needs no gradient"
    monkeypatch.setattr(own_words.Reduced, "forward", staticmethod(lambda ctx, x, group: x.clone()))
    assert "forward" in failed(proved(subject, SHORT, truth="alone", explain=False))


def raising(case: Any, device: torch.device) -> Mapping[str, Tensor]:
    raise ZeroDivisionError("1/0")


def test_a_truth_that_fails_or_lacks_is_the_users() -> None:
    for truth, kind, rule in (
        (raising, Unanswered, r"truth failed: ZeroDivisionError: 1/0, at .*test_own_truth.py:\d+ in"),
        (lambda *_: {"loss/0": torch.tensor(float("nan"))}, RequestError, "the truth of .* is not finite in loss/0; l"),
        (None, RequestError, "so the decoder of shardproof is not its truth; legal"),
    ):
        with pytest.raises(kind, match=rule):
            proved(Network(truth=truth), "tp=2")


def test_a_truth_may_return_numbers_of_8_bits() -> None:
    def truth(case: Any, device: torch.device) -> Mapping[str, Tensor]:
        return {"packed/0": torch.ones(3).to(torch.float8_e4m3fn), **own_words.truth(case, device)}

    assert failed(proved(Network(truth=truth), "tp=2")) == set()


@pytest.mark.parametrize(("name", "bad"), [("masked/0", math.nan), ("loss/0", math.inf), ("param/0", -math.inf)])
def test_a_truth_may_mask_with_infinities_what_no_training_makes(name: str, bad: float) -> None:
    def returning(name: str, number: float) -> Changed:
        masked = torch.tensor([1.0, number], dtype=torch.float64)
        network = Network(truth=lambda case, device: {**own_words.truth(case, device), name: masked})
        return Changed(network, lambda case, outcome: {name: masked})

    assert failed(proved(returning("masked/0", -math.inf), "tp=2")) == set()
    with pytest.raises(RequestError, match=f"not finite in {name}"):
        proved(returning(name, bad), "tp=2")


def test_a_value_beside_a_truth_of_zero_is_told_as_it_is() -> None:
    """A control run that is not 0 either, by more than rounding, is no overflow."""

    def truth(case: Any, device: torch.device) -> Mapping[str, Tensor]:
        dropped = 0.0 if case.dtype == "float64" else 2.0**-40
        return {"dropped/0": torch.full((3,), dropped), **own_words.truth(case, device)}

    off = Changed(Network(truth=truth), lambda case, outcome: {"dropped/0": torch.full((3,), 0.125)})
    result = proved(off, "tp=2 micro=1 steps=1 dtype=float32")
    assert failed(result) == {"forward"}, "zeros say nothing of another function"
    message = verdict_of(result, "forward").message
    assert "dropped/0 differs from the dense model" in message and "finite" not in message
    assert f"the truth is 0 throughout: allowed {6 * 2.0**-40:.3g}, found 0.125" in message


def test_a_session_that_cannot_be_left_is_told_as_an_error_of_the_subject() -> None:
    class Stuck(Network):
        @contextmanager
        def session(self) -> Iterator[None]:
            yield
            raise ValueError("still patched")

    with pytest.raises(ShardproofError, match="still patched"):
        proved(Stuck(), "tp=1 micro=1 steps=1")


def test_the_session_surrounds_the_ranks_and_the_truth(engine: InprocEngine) -> None:
    open_now: list[str] = []
    seen: set[str] = set()
    outside: list[str] = []

    class Inside(Network):
        @contextmanager
        def session(self) -> Iterator[None]:
            open_now.append("patched")
            yield
            open_now.pop()

        def __call__(self, case: Any, device: torch.device) -> Mapping[str, Any]:
            seen.update(f"{word} ranks" for word in open_now)
            outside.extend([] if open_now else [str(device)])
            torch.distributed.all_reduce(torch.ones(2))  # read by nobody
            return super().__call__(case, device)

        def truth(self, case: Any, device: torch.device) -> Mapping[str, Tensor]:
            seen.update(f"{word} truth" for word in open_now)
            return own_words.truth(case, device)

    assert failed(proved(Inside(), "tp=2")) == set()
    assert (seen, open_now) == ({"patched ranks", "patched truth"}, [])
    with DryEngine() as dry:
        assert failed(proved(Inside(), "tp=2", dry)) == set()
    given = resolve_subject(Inside())
    execute(case_of("tp=2", given), Probed(given, NarrowProbe), engine, text="tp=2", record=False)
    tried = survey_faults(Vocabulary.of(own_words.WORDS).parse("tp=2 micro=1 steps=1"), Inside(), engine)
    assert UNREAD in {found.equivalent for found in tried} and outside == []


@pytest.mark.parametrize("parts", [2, 5])
def test_partial_sums_change_rounding_alone_forward_and_backward(parts: int) -> None:
    def outcome(dtype: torch.dtype, cut: bool) -> list[Tensor]:
        torch.manual_seed(5)
        x, w, b = (torch.randn(*shape, dtype=torch.float64) for shape in ((7, 3, 11), (13, 11), (13,)))
        leaves = [one.to(dtype).requires_grad_() for one in (x, w, b)]
        with partial_sums(parts if cut else 1):
            y = torch.nn.functional.linear(*leaves)
            q = y.view(1, 7, 3, 13).transpose(1, 2)
            z = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum((0, 1)).square().mean()
            return [z.detach(), *torch.autograd.grad(z, leaves)]

    exact = outcome(torch.float64, False)
    assert all(torch.allclose(a, b, rtol=1e-11) for a, b in zip(outcome(torch.float64, True), exact, strict=True))
    low, cut = outcome(torch.bfloat16, False), outcome(torch.bfloat16, True)
    assert any(not torch.equal(a, b) for a, b in zip(low, cut, strict=True)), "nothing was cut"


def test_a_plain_case_has_its_words_and_refuses_others() -> None:
    known = Vocabulary.of({"width": 12, "act": ("relu", "tanh"), "micro": 3, "tied": False})
    case = known.parse("tp=2 dp=3 pp=2 tied=true")
    assert (case.width, case.act, case.micro, case.tied, case.world_size) == (12, "relu", 3, True, 12)
    assert known.parse(str(case)) == case and case.but(act="tanh").act == "tanh"
    assert case.axes["dp"] == ((0, 2, 4), (1, 3, 5), (6, 8, 10), (7, 9, 11))
    drawn = {n for step in range(2) for micro in range(3) for dp in range(3) for n in case.samples(step, micro, dp, 5)}
    assert drawn == set(range(2 * 3 * 3 * 5)), "every sample once"
    for text, rule in {
        "tp=0": "tp=0: must be at least 1; legal: tp=1",
        "depth=3": "depth=3: is no word of this subject's cases; legal: tp cp dp pp steps",
        "act=gelu": "act=gelu: is none of its values; legal: relu|tanh",
        "tied=1": "tied=1: must be true or false",
        "width=x": "width=x: must be a whole number; legal: width=12",
        "width=\N{ARABIC-INDIC DIGIT TWO}": "must be a whole number; legal: width=12",
        "tp": "tp=: must be a word and its value",
    }.items():
        with pytest.raises(ValueError, match=rule.replace("|", r"\|")):
            known.parse(text)
    twice: dict[str, Any] = {"act": ("relu", "relu", "tanh")}
    assert Vocabulary.of(twice) == Vocabulary.of({"act": ("relu", "tanh")})
    never: list[Any] = [{"axes": 3}, {"a b": 3}, {"act": ("a", 3)}, {"act": (1, True)}, {"act": "a b"}, ["width"]]
    never += [{"act": ()}, {"act": ([],)}, {"micro": 0}, {"steps": (2, 0)}, {"tp": "2"}, {"seed": True}]
    never += [{"dtype": "f8"}]
    for wrong in never:
        with pytest.raises(TypeError, match="words"):
            Vocabulary.of(wrong)


ONE_OF_EACH: dict[str, Any] = {"act": ("relu",), "tied": (True,), "width": (12,), "micro": (1,), "steps": (2,)}
ONE_OF_EACH |= {"dtype": ("float32",), "seed": (5,), "tp": (1,)}
OTHERS = {"act=tanh": "relu", "tied=false": "true", "width=13": "12", "micro=3": "1", "steps=1": "2", "seed=0": "5"}
OTHERS |= {"tp=2": "1"}


def test_a_tuple_of_one_value_leaves_no_other_to_a_request_an_experiment_or_another_grouping() -> None:
    class Narrow(own_words.Network):
        """Takes one value of each of these words."""

        words: Any = {**own_words.WORDS, **ONE_OF_EACH}
        cases: Any = ("dp=2",)

    subject = resolve_subject(Narrow())
    for text, legal in {**OTHERS, "dtype=float64": "float32"}.items():
        with pytest.raises(RequestError, match=f"^case '{text}': {text}: is none of its values; legal: {legal}$"):
            case_of(text, subject)
    (case,) = own_cases(subject) or ()
    assert domains_of(case, subject) == {"dp": (1, 2)} and groupings(case, subject) == [] and not refusal(case, subject)
    assert refusal(case.but(dtype="float64"), subject) == "dtype=float64: is none of its values; legal: float32"
    assert failed(proved(Narrow(), case)) == set(), "its truth is computed in float64 all the same"
    with pytest.raises(RequestError, match="no such case on one rank .micro=2: is none of its values; legal: 1"):
        proved(Narrow(), case, truth="alone")


def groups(sizes: dict[str, int]) -> dict[str, set[tuple[int, ...]]]:
    """The groups of every axis where ranks are numbered with the first axis fastest, as Megatron-Core does."""
    places = [place[::-1] for place in itertools.product(*(range(size) for size in reversed(sizes.values())))]
    found: dict[str, dict[tuple[int, ...], list[int]]] = {axis: {} for axis in sizes}
    for rank, place in enumerate(places):
        for number, axis in enumerate(sizes):
            found[axis].setdefault(place[:number] + place[number + 1 :], []).append(rank)
    return {axis: {*map(tuple, lists.values())} for axis, lists in found.items()}


EXPERTS = Vocabulary.of({"ep": 1, "etp": 1})


def test_the_groups_are_those_of_megatrons_order() -> None:
    for tp, cp, dp, pp, ep, etp in itertools.product((1, 2, 3), (1, 2), (1, 2), (1, 2), (1, 2, 4), (1, 2)):
        if tp * cp * dp % (ep * etp):
            continue
        case = EXPERTS.parse(f"tp={tp} cp={cp} dp={dp} pp={pp} ep={ep} etp={etp}")
        dense = groups({"tp": tp, "cp": cp, "dp": dp, "pp": pp})
        expert = groups({"etp": etp, "ep": ep, "edp": tp * cp * dp // (etp * ep), "pp": pp})
        assert case.world_size == tp * cp * dp * pp
        for axis in ("tp", "cp", "dp", "pp", "etp", "ep", "edp"):
            assert sorted(case.axes[axis]) == sorted({**expert, **dense}[axis]), (case, axis)
            assert all(case.axis_rank(axis, rank) == ranks.index(rank) for ranks in case.axes[axis] for rank in ranks)


def test_without_a_word_for_it_etp_is_tp_and_a_case_without_both_has_no_expert_axes() -> None:
    case = Vocabulary.of({"ep": (1, 2)}).parse("tp=2 dp=2 ep=2")
    assert case.axis_sizes == {"tp": 2, "cp": 1, "dp": 2, "pp": 1, "etp": 2, "ep": 2, "edp": 1}
    assert case.axes["ep"] == ((0, 2), (1, 3)) and case.mode == "dp+ep+tp"
    assert set(Vocabulary.of({}).parse("tp=2").axes) == {"tp", "cp", "dp", "pp"}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("dp=2 ep=3", "ep=3: must divide tp * cp * dp, 2; legal: ep=1"),
        ("tp=2 dp=2 etp=2 ep=4", "ep=4: must divide tp * cp * dp, 2; legal: ep=1"),
        ("pp=2 ep=2", "ep=2: must divide tp * cp * dp, 1; legal: ep=1"),
        ("ep=0", "ep=0: must be at least 1; legal: ep=1"),
    ],
)
def test_experts_that_do_not_lie_evenly_on_the_ranks_are_refused(text: str, told: str) -> None:
    with pytest.raises(WordError, match=told.replace("*", r"\*")):
        EXPERTS.parse(text)
    with pytest.raises(TypeError, match="the ranks of an axis are a whole number; legal: {'ep': 1}"):
        Vocabulary.of({"ep": "none"})
