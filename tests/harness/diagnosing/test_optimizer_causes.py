"""The first place that went wrong, causes that a ledger shows, and causes of a wrong step of an optimizer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from shardproof.harness.checking.checks import run_checks
from shardproof.harness.checking.records import Evidence
from shardproof.harness.diagnosing.diagnosis import diagnose
from shardproof.harness.diagnosing.first_place import first_place
from shardproof.harness.diagnosing.rank_causes import by_numbers
from shardproof.harness.ledger import Event
from shardproof.harness.protocols import Shard
from shardproof.harness.verdicts.facts import First
from shardproof.harness.verdicts.verdict import FAIL
from tests.harness.toy_evidence import (
    altered,
    but,
    case,
    drawn,
    events,
    evidence,
    ids_of,
    planted,
    told_by,
    truth,
    without,
)

NAMES = ("layers.0.mlp.w1.weight", "layers.0.mlp.w2.bias")
ADAM, SGD = "mode=tp tp=2 seq=16 optimizer=adamw lr=0.01", "mode=tp tp=2 seq=16 lr=0.1"
CLIPS = f"{SGD} clip=0.5"


START, *GRADIENTS = (
    {name: drawn(*truth()[f"grad/{name}"].shape, seed=len(name) + seed) for name in NAMES} for seed in (31, 62, 93)
)
NORMS = [torch.stack([g.square().sum() for g in step.values()]).sum().sqrt() for step in GRADIENTS]


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The rules of Adam; `count` is the step that the bias correction of a step takes it for."""

    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    decay: float = 0.01
    in_gradient: float = 0.0
    scale: float = 1.0
    rate: float = 0.01
    keeps: bool = True
    count: Callable[[int], float] = lambda step: step + 1


RIGHT = Rules()
State = dict[str, Tensor]


def adam(rules: Rules, step: int, before: State) -> State:
    """State after one step, by the names of an outcome, from the states before it."""
    (b1, b2), left = rules.betas, dict[str, Tensor]()
    for name in NAMES:
        p = before.get(f"param_after/{step - 1}/{name}", START[name])
        g = rules.scale * GRADIENTS[step][name] + rules.in_gradient * p
        kept = rules.keeps and step > 0
        m, v = (before[f"{kind}_after/{step - 1}/{name}"] if kept else 0 * p for kind in ("exp_avg", "exp_avg_sq"))
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        count = rules.count(step)
        size = rules.rate / (1 - b1**count)
        moved = p - rules.rate * rules.decay * p - size * m / ((v / (1 - b2**count)).sqrt() + rules.epsilon)
        left[f"exp_avg_after/{step}/{name}"], left[f"exp_avg_sq_after/{step}/{name}"] = m, v
        left[f"param/{name}" if step else f"param_after/0/{name}"] = moved
    return left


def seen_of(text: str, values: State, true: State) -> tuple[Evidence, list[str]]:
    """Evidence of these states beside the true ones, and the wrong names in the reverse order of training."""
    norms = {f"grad_norm/{step}": norm for step, norm in enumerate(NORMS)}
    known = {**truth(), **{f"grad/{name}": GRADIENTS[0][name] for name in NAMES}, **norms}
    shares = {f"start/{name}": start for name, start in START.items()}
    seen = planted({**known, **values}, truth={**known, **true}, case=case(text), shares=shares)
    return seen, [name for name in reversed(true) if not torch.equal(true[name], values[name])]


def told_of(wrong: Rules, steps: int = 1) -> list[str]:
    """Ids when the last of these steps follows these rules, and the ones before it the right ones."""
    values: dict[str, Any] = {}
    true: dict[str, Any] = {}
    for step in range(steps):
        true |= adam(RIGHT, step, values)
        values |= adam(wrong if step == steps - 1 else RIGHT, step, values)
    return [cause.id for cause in by_numbers(*seen_of(ADAM, values, true))]


@pytest.mark.parametrize(
    ("wrong", "ids"),
    [
        (Rules(betas=(0.8, 0.999)), ["optimizer_state"]),
        (Rules(betas=(0.9, 0.95)), ["optimizer_state"]),
        (Rules(betas=(0.8, 0.95)), ["optimizer_state"]),
        (Rules(epsilon=1e-3), []),
        (Rules(decay=0.0), ["optimizer_state"]),
        (Rules(decay=0.1), ["optimizer_state"]),
        (Rules(decay=0.0, in_gradient=0.01), ["optimizer_state"]),
        (Rules(scale=1.7), ["constant_factor"]),
        (Rules(scale=-1.0), ["constant_factor"]),
        (Rules(rate=0.007), ["constant_factor"]),
        (Rules(count=lambda step: 9999), ["optimizer_state"]),
        (Rules(count=lambda step: step + 2), ["optimizer_state"]),
        (Rules(epsilon=1e-3, decay=0.1), []),  # two rules at once are none of these
    ],
)
def test_rules_of_adam(wrong: Rules, ids: list[str]) -> None:
    assert [told_of(wrong, steps) for steps in (1, 2)] == [ids] * 2


def test_a_factor_that_begins_in_a_later_step_comes_from_no_sum() -> None:
    """A factor of one half in the first step may be a mean over tp=2. One that begins later may not: sums are in every
    step.
    """
    assert [told_of(Rules(rate=0.005), steps) for steps in (1, 2)] == [["size_factor"], ["constant_factor"]]


def test_moments_that_begin_anew_and_a_learning_rate_behind_clipped_ones() -> None:
    """The learning rate plays no part in clipping."""
    assert told_of(Rules(keeps=False), 2) == ["optimizer_state"]
    true = adam(RIGHT, 0, {})
    seen, names = seen_of(f"{ADAM} clip=0.5", {**true, **adam(Rules(rate=0.007), 0, {})}, true)
    (cause,) = by_numbers(seen, names)
    assert cause.words == "the updates of step 0 are 0.7 x the right ones"


def sgd(second: Callable[[Tensor, Tensor, Tensor], Tensor], text: str = SGD, factor: float = 1.0) -> list[str]:
    """Ids when the second of two plain steps moves by `second(gradient, what the first moved, parameter)`."""
    values: State = {}
    true: State = {}
    for name in NAMES:
        first = -0.1 * factor * GRADIENTS[0][name]
        values[f"param_after/0/{name}"] = true[f"param_after/0/{name}"] = p = START[name] + first
        true[f"param/{name}"] = p - 0.1 * factor * GRADIENTS[1][name]
        values[f"param/{name}"] = p + second(GRADIENTS[1][name], first, p)
    return [cause.id for cause in by_numbers(*seen_of(text, values, true))]


def test_plain_steps_and_clipping_by_other_rules() -> None:
    assert sgd(lambda g, last, p: -0.1 * g + 0.9 * last) == ["optimizer_state"]
    assert sgd(lambda g, last, p: -0.1 * g - 0.001 * p) == ["optimizer_state"]
    assert sgd(lambda g, last, p: -0.1 * g + 0.9 * last.flip(0)) == []
    factor = 0.5 / float(NORMS[1])

    def alone(g: Tensor, last: Tensor, p: Tensor) -> Tensor:
        return -0.1 * g * min(1.0, 0.5 / float(g.norm()))

    for rule in (alone, lambda g, last, p: -0.1 * g.clamp(-0.3, 0.3)):
        assert sgd(rule, CLIPS, factor) == []  # a factor of its own for each tensor, or element
    # A part has a smaller norm than the whole: rates by parameter are no clipping of it.
    assert sgd(lambda g, last, p: -0.1 * factor * g * (0.9 if g.dim() > 1 else 0.5), CLIPS, factor) == []
    assert sgd(lambda g, last, p: -0.1 * g, CLIPS, factor) == ["constant_factor"]
    assert sgd(lambda g, last, p: -0.1 * g * factor * 0.7, CLIPS, factor) == ["constant_factor"]
    assert sgd(lambda g, last, p: -0.1 * factor * g.roll(1, 0), CLIPS, factor) == []


def test_a_step_that_some_ranks_do_not_take() -> None:
    def ranks(first: float, second: float) -> list[str]:
        """Ids when the two ranks move their parts of the first parameter by these shares of the right step."""
        name, true = NAMES[0], {f"param_after/0/{NAMES[0]}": START[NAMES[0]] - GRADIENTS[0][NAMES[0]]}
        values = {}
        for rank, share in enumerate((first, second)):
            moved = START[name] - share * GRADIENTS[0][name]
            values[rank] = {f"param_after/0/{name}": Shard(moved.chunk(2)[rank], (4 * rank, 0), (8, 6))}
        seen = evidence(
            *values.values(), truth={**truth(), **true}, case=case(SGD), shares={f"start/{name}": START[name]}
        )
        return [cause.id for cause in by_numbers(seen, [f"param_after/0/{name}"])]

    assert ranks(1.0, 0.0) == ["never_updated"]
    assert ranks(0.5, 0.0) == []
    assert ranks(0.7, 0.7) == ["constant_factor"]


W1, PARAM = "grad/layers.0.mlp.w1.weight", "param/layers.0.mlp.w1.weight"


@pytest.mark.parametrize(
    ("first", "place", "later"),
    [
        ("act/layers.0.mlp.w2", "forward of layers.0.mlp.w2 in step 0", ["act/layers.0.mlp", "act/head", "loss/0", W1]),
        ("act_grad/layers.0.mlp.w1", "backward of layers.0.mlp in step 0", ["act_grad/embedding", W1, "loss/1"]),
        (W1, "backward of layers.0.mlp.w1 in step 0", [PARAM]),
        (W1, "backward of head in step 0", ["grad/embedding.tokens.weight"]),
        ("loss/1", "loss in step 1", [PARAM]),
        (PARAM, "optimizer update of layers.0.mlp.w1 in step 1", []),
        ("grad_norm/1", "grad_sync in step 1", [PARAM]),
    ],
)
def test_the_first_wrong_place_is_the_first_that_training_computes(first: str, place: str, later: list[str]) -> None:
    line = told_by(planted({name: truth()[name] + 1 for name in (first, *later)}))[3]
    assert line.partition("; between ")[0] == f"first:  {place}: {first}"


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


def test_the_earlier_of_tensor_and_event_is_the_first_place() -> None:
    def first_of(seen: Evidence, check: str) -> First:
        return diagnose(seen, run_checks(seen), check).first

    grad, lost = planted({W1: truth()[W1] * 2}), without(events(), phase="backward", region="head")
    both = but(grad, events=lost)
    assert first_of(grad, "parameter_gradients").region == "layers.0.mlp.w1"
    first = first_of(both, "parameter_gradients")  # a gradient may be wrong because of a call in backward
    assert (first.phase, first.region, first.name) == ("backward", "head", W1)
    act = planted({"act/head": truth()["act/head"] * 2})
    first = first_of(but(act, events=lost), "activations")  # a call in backward cannot explain a wrong activation
    assert (first.phase, first.region, first.name) == ("forward", "head", "act/head")
    assert first.event.startswith("missing event in backward of head")


@pytest.mark.parametrize(
    ("wrong", "cause"),
    [
        (altered(events(), 0, axis="dp"), "wrong_group"),
        (altered(events(), 0, op="all_gather", reduce_op=""), "wrong_call"),
        (altered(events(), 0, reduce_op="avg"), "wrong_call"),
        (altered(events(), 0, reduce_op="max"), "wrong_call"),
        (altered(events(), 0, payload_bytes=8), "wrong_call"),
        (altered(events(), 0, dtype="float32"), "wrong_call"),
        (altered(events(), 0, region="head"), "wrong_call"),
        (altered(events(), 0, phase="loss"), "wrong_call"),
        (altered(events(), 0, group_size=4), "wrong_group"),
        (without(events(), region="head"), "missing_call"),
        (events() + tuple(event for event in events() if event.region == "embedding"), "extra_call"),
    ],
)
def test_a_call_made_otherwise_has_a_cause(wrong: tuple[Event, ...], cause: str) -> None:
    """A call that only the first rank issues is reported with that rank."""
    seen = evidence(events=wrong)
    assert ids_of(seen) == [cause]
    found = run_checks(seen)["ledger"]
    assert found.verdict == FAIL and (len(wrong) != len(events()) or found.ranks == (0,))


def test_what_is_sent_in_a_shorter_dtype_is_told_by_its_call() -> None:
    """The ledger names the call that rounds; where numbers of that dtype entered arithmetic follows from it."""
    called = altered(events(), 0, dtype="float32", payload_bytes=192)
    seen = planted({W1: truth()[W1] * 2}, events=called, low_precision_op="float32, which enters at model.py:7")
    assert ids_of(seen) == ["wrong_call"]
    assert ids_of(but(seen, events=events())) == ["shorter_dtype"]
