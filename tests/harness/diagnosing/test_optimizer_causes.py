"""Causes of a wrong step: an optimizer written out by hand, with one of its rules changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.checking.evidence import Evidence
from harness.diagnosing.rules.optimizer.steps import from_states
from harness.shard import Shard
from tests.harness.toy_evidence import case, evidence, outcome_of, truth

NAMES = ("layers.0.mlp.w1.weight", "layers.0.mlp.w2.bias")
ADAM, SGD = "mode=tp tp=2 seq=16 optimizer=adamw lr=0.01", "mode=tp tp=2 seq=16 lr=0.1"
CLIPS = f"{SGD} clip=0.5"


def drawn(name: str, seed: int) -> Tensor:
    shape = truth()[f"grad/{name}"].shape
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(name) + 31 * seed), dtype=torch.float64)


START = {name: drawn(name, 1) for name in NAMES}
GRADIENTS = [{name: drawn(name, 2) for name in NAMES}, {name: drawn(name, 3) for name in NAMES}]
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
    """What one step leaves, by the names of an outcome, from the states before it."""
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
    """Evidence of these states beside the true ones, and the wrong names, last first as training is looked through."""
    norms = {f"grad_norm/{step}": norm for step, norm in enumerate(NORMS)}
    known = {**truth(), **{f"grad/{name}": GRADIENTS[0][name] for name in NAMES}, **norms}
    outcomes = (outcome_of(rank, {**known, **values}) for rank in range(2))
    shares = {f"start/{name}": start for name, start in START.items()}
    seen = evidence(*outcomes, truth={**known, **true}, case=case(text), shares=shares)
    return seen, [name for name in reversed(true) if not torch.equal(true[name], values[name])]


def told_of(wrong: Rules, steps: int = 1) -> list[str]:
    """Ids when the last of these steps follows these rules, and the ones before it the right ones."""
    values: dict[str, Any] = {}
    true: dict[str, Any] = {}
    for step in range(steps):
        true |= adam(RIGHT, step, values)
        values |= adam(wrong if step == steps - 1 else RIGHT, step, values)
    seen, names = seen_of(ADAM, values, true)
    return [cause.id for cause in from_states(seen, names)]


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize(
    ("wrong", "ids"),
    [
        (Rules(betas=(0.8, 0.999)), ["other_beta"]),
        (Rules(betas=(0.9, 0.95)), ["other_beta"]),
        (Rules(betas=(0.8, 0.95)), ["other_beta"]),
        (Rules(epsilon=1e-3), ["other_epsilon"]),
        (Rules(decay=0.0), ["decay_missing"]),
        (Rules(decay=0.1), ["decay_added"]),
        (Rules(decay=0.0, in_gradient=0.01), ["decay_in_gradient"]),
        (Rules(scale=1.7), ["constant_factor"]),
        (Rules(scale=-1.0), ["sign"]),
        (Rules(rate=0.007), ["constant_factor"]),
        (Rules(count=lambda step: 9999), ["bias_correction"]),
        (Rules(count=lambda step: step + 2), ["bias_correction"]),
        (Rules(epsilon=1e-3, decay=0.1), []),  # two rules at once are none of these
    ],
)
def test_rules_of_adam(wrong: Rules, ids: list[str], steps: int) -> None:
    assert told_of(wrong, steps) == ids


def test_a_learning_rate_behind_clipped_moments_is_no_matter_of_clipping() -> None:
    true = adam(RIGHT, 0, {})
    seen, names = seen_of(f"{ADAM} clip=0.5", {**true, **adam(Rules(rate=0.007), 0, {})}, true)
    (cause,) = from_states(seen, names)
    assert cause.words.endswith("constant factor is wrong, such as the learning rate")


def test_moments_that_begin_anew() -> None:
    assert told_of(Rules(keeps=False), 2) == ["moments_reset"]


def sgd(second: Callable[[Tensor, Tensor, Tensor], Tensor], text: str = SGD, factor: float = 1.0) -> list[str]:
    """Ids when the second of two plain steps moves by `second(gradient, what the first moved, parameter)`."""
    values: State = {}
    true: State = {}
    for name in NAMES:
        first = -0.1 * factor * GRADIENTS[0][name]
        values[f"param_after/0/{name}"] = true[f"param_after/0/{name}"] = p = START[name] + first
        true[f"param/{name}"] = p - 0.1 * factor * GRADIENTS[1][name]
        values[f"param/{name}"] = p + second(GRADIENTS[1][name], first, p)
    seen, names = seen_of(text, values, true)
    return [cause.id for cause in from_states(seen, names)]


def test_plain_steps() -> None:
    assert sgd(lambda g, last, p: -0.1 * g + 0.9 * last) == ["momentum_added"]
    assert sgd(lambda g, last, p: -0.1 * g - 0.001 * p) == ["decay_added"]
    assert sgd(lambda g, last, p: -0.1 * g - 0.3 * p) == []  # no decay is as strong
    assert sgd(lambda g, last, p: -0.1 * g + 0.9 * last.flip(0)) == []


def test_clipping_by_other_rules() -> None:
    factor = 0.5 / float(NORMS[1])

    def alone(g: Tensor, last: Tensor, p: Tensor) -> Tensor:
        return -0.1 * g * min(1.0, 0.5 / float(g.norm()))

    for rule in (alone, lambda g, last, p: -0.1 * g.clamp(-0.3, 0.3)):
        assert sgd(rule, CLIPS, factor) == ["clipped_otherwise"]
        assert sgd(rule, SGD, factor) == []  # a case that clips nothing
    assert sgd(lambda g, last, p: -0.1 * g, CLIPS, factor) == ["unclipped"]
    squared = 0.5 / float(NORMS[1]) ** 2
    assert sgd(lambda g, last, p: -0.1 * g * squared, CLIPS, factor) == ["clipped_otherwise"]
    assert sgd(lambda g, last, p: -0.1 * g * factor * 0.7, CLIPS, factor) == []  # of another limit, or another rate
    wide = f"{SGD} clip=1000.0"  # where nothing is clipped, what is larger is no matter of clipping
    assert sgd(lambda g, last, p: -0.17 * g, wide) == ["constant_factor"]
    assert sgd(lambda g, last, p: -0.07 * g, wide) == []
    assert sgd(lambda g, last, p: -0.1 * factor * g.roll(1, 0), CLIPS, factor) == []


def test_a_step_that_some_ranks_do_not_take() -> None:
    def ranks(first: float, second: float) -> list[str]:
        """Ids when the two ranks move their parts of the first parameter by so much of what they should."""
        name, true = NAMES[0], {f"param_after/0/{NAMES[0]}": START[NAMES[0]] - GRADIENTS[0][NAMES[0]]}
        values = {}
        for rank, share in enumerate((first, second)):
            moved = START[name] - share * GRADIENTS[0][name]
            values[rank] = {f"param_after/0/{name}": Shard(moved.chunk(2)[rank], (4 * rank, 0), (8, 6))}
        seen = evidence(
            *values.values(), truth={**truth(), **true}, case=case(SGD), shares={f"start/{name}": START[name]}
        )
        return [cause.id for cause in from_states(seen, [f"param_after/0/{name}"])]

    assert ranks(1.0, 0.0) == ["never_updated"]
    assert ranks(0.5, 0.0) == []
    assert ranks(0.7, 0.7) == ["constant_factor"]
