"""The kind of an outcome name, and the step in it."""

import functools
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

NUMERIC_KINDS: dict[str, tuple[str, ...]] = {
    "initial_values": ("init",),
    "masks": ("mask",),
    "tokens": ("tokens",),
    "routing": ("routing",),
    "forward": ("loss", "logits", "metric"),
    "activations": ("act",),
    "activation_gradients": ("act_grad",),
    "parameter_gradients": ("grad",),
    "gradient_norm": ("grad_norm",),
    "update": ("param_after", "exp_avg_after", "exp_avg_sq_after", "value_after", "param"),
    "saved": ("saved",),
}
"""Check -> the kinds of names it compares, in the order in which training computes them."""
KIND_WORDS: dict[str, str] = {
    "act": "activations",
    "act_grad": "activation gradients",
    "grad": "gradients",
    "grad_norm": "gradient norms",
    "param": "parameters",
    "param_after": "parameters",
    "exp_avg_after": "optimizer states",
    "exp_avg_sq_after": "optimizer states",
    "value_after": "values updated once a step",
}
"""Kind of name -> what such tensors are called, if not by that kind."""


@functools.lru_cache(maxsize=4096)
def kind_of(name: str) -> str:
    """The kind of an outcome name: "grad" of "grad/layers.0.mlp.w1.weight"."""
    return name.partition("/")[0]


def is_state(name: str) -> bool:
    """Whether an outcome name is that of a state after a step: "param_after/0/layers.0.mlp.w1.weight"."""
    return kind_of(name).endswith("_after")


def select_comparable(truth: Mapping[str, Tensor], outcomes: Sequence[Iterable[str]]) -> Mapping[str, Tensor]:
    """The truth as far as ranks can be compared with it: without states if no rank returned any."""
    if any(is_state(name) for outcome in outcomes for name in outcome):
        return truth
    return {name: tensor for name, tensor in truth.items() if not is_state(name)}


def never_made(truth: Mapping[str, Tensor], returned: Iterable[str]) -> list[str]:
    """The optimizer states that ranks return for a step that the truth skips (`skipped/<step>`), which has none."""
    skipped = {step_of(name) for name, tensor in truth.items() if kind_of(name) == "skipped" and bool(tensor.any())}
    return [name for name in returned if is_state(name) and name not in truth and step_of(name) in skipped]


def step_of(name: str) -> int:
    """The step in an outcome name: 3 of "loss/3" and of "param_after/3/head.weight"; -1 if it has none."""
    word = name.partition("/")[2].partition("/")[0]
    return int(word) if word.isdecimal() else -1
