"""What-ifs of the modules: activations when attention, rotation, a norm, a nonlinearity or a residual has another rule.

Activations alone, for what is wrong in backward follows from them. Every reading is a rule that some system uses in
place of the case's own, or a common slip. Letters as in `reference.model.layers`. Sources: muP (arXiv:2203.03466) for
scores over the width; Llama's two rotary layouts; Gemma's norm weights less one; GLU variants, arXiv:2002.05202;
parallel blocks, arXiv:2204.02311.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from shardproof.reference.case import Case
from shardproof.reference.model import layers
from shardproof.reference.model.decoder import Arithmetic
from shardproof.reference.what_ifs.what_if import ACTIVATIONS, WhatIf, by_arithmetic, by_attention

_EPSILONS = (0.0, 1e-12, 1e-8, 1e-6, 1e-3)
_BASES = (500_000.0, 1_000_000.0)
_Attention = Callable[..., Tensor]


def _scores(case: Case) -> Mapping[str, _Attention]:
    factors = {
        "width": case.head_dim**-0.5,
        "not": math.sqrt(case.head_dim),
        "hidden": math.sqrt(case.head_dim / case.hidden),
    }
    return {reading: partial(_scaled, factor=factor) for reading, factor in factors.items()}


def _scaled(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, *factors: Tensor, factor: float) -> Tensor:
    return layers.attention(q * factor, k, v, visible, *factors)


def _all_seen(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, *factors: Tensor) -> Tensor:
    return layers.attention(q, k, v, visible | visible.t(), *factors)


def _next_seen(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, *factors: Tensor) -> Tensor:
    following = torch.ones_like(visible).triu(1).tril(1)
    return layers.attention(q, k, v, visible | (visible.t() & following), *factors)


_Rotate = Callable[[str, Tensor, Tensor], Tensor]


def _rotations(case: Case) -> dict[str, _Rotate]:
    if case.positions != "rope":
        return {}
    return {
        "pairs": _rotated_in_pairs,
        "backwards": lambda what, x, positions: layers.rotate(x, -positions),
        "queries_alone": lambda what, x, positions: layers.rotate(x, positions) if what == "q" else x,
        "keys_alone": lambda what, x, positions: layers.rotate(x, positions) if what == "k" else x,
        **{f"base{base:g}": partial(_rotated_by, base) for base in _BASES},
    }


def _rotated_in_pairs(what: str, x: Tensor, positions: Tensor) -> Tensor:
    """Features 2i and 2i + 1 turn together, not i and i + D/2."""
    apart = torch.cat((x[..., 0::2], x[..., 1::2]), -1)
    return torch.stack(layers.rotate(apart, positions).chunk(2, -1), -1).flatten(-2)


def _rotated_by(base: float, what: str, x: Tensor, positions: Tensor) -> Tensor:
    """Pair i turns by position / base^(2i/D): by places that make up for the other base, one pair at a time."""
    half = x.shape[-1] // 2
    turned = torch.empty_like(x)
    for pair in range(half):
        places = positions.double() * (layers.ROTARY_BASE / base) ** (pair / half)
        turned[..., pair::half] = layers.rotate(x, places)[..., pair::half]
    return turned


def _norms(case: Case) -> dict[str, Callable[[Tensor, Tensor, Tensor | None], Tensor]]:
    found: dict[str, Callable[[Tensor, Tensor, Tensor | None], Tensor]] = {
        "left_out": lambda x, weight, bias: x,
        "unweighted": lambda x, weight, bias: _norm(x, torch.ones_like(weight), bias),
        "weight_less_one": lambda x, weight, bias: _norm(x, 1 + weight, bias),
        "other_centre": partial(_norm, other_centre=True),
    }
    if case.qk_norm:
        found["heads_left_out"] = lambda x, weight, bias: x if x.dim() == 4 else _norm(x, weight, bias)
    return found


def _norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, epsilon: float = layers.EPSILON, other_centre: bool = False
) -> Tensor:
    """`layers.norm` with another epsilon, or centred where it is not and the other way round."""
    y = x - x.mean(-1, keepdim=True) if (bias is None) == other_centre else x
    y = y / (y.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight
    return y if bias is None else y + bias


_NONLINEARITIES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": partial(functional.gelu, approximate="tanh"),
    "gelu_by_erf": functional.gelu,
    "gelu_by_sigmoid": lambda x: x * (1.702 * x).sigmoid(),
    "relu": functional.relu,
    "relu_squared": lambda x: functional.relu(x).square(),
    "silu": functional.silu,
    "sigmoid": torch.sigmoid,
    "none": lambda x: x,
}


def _nonlinearities(case: Case) -> Mapping[str, Arithmetic]:
    own = "silu" if case.activation == "swiglu" else case.activation
    others = {reading: activate for reading, activate in _NONLINEARITIES.items() if reading != own}
    return {reading: Arithmetic(activate=partial(_activate, activate)) for reading, activate in others.items()}


def _activate(nonlinearity: Callable[[Tensor], Tensor], kind: str, x: Tensor, gate: Tensor | None = None) -> Tensor:
    return nonlinearity(x) if gate is None else nonlinearity(gate) * x


def _joined(left_out: tuple[str, ...], branch: str, x: Tensor, y: Tensor) -> Tensor:
    return y if branch in left_out else x + y


class _Parallel:
    """Residuals of a block whose attention and MLP both read what entered it, as those of GPT-J and PaLM do."""

    def __init__(self) -> None:
        self._attended: list[Tensor] = []

    def __call__(self, branch: str, x: Tensor, y: Tensor) -> Tensor:
        if branch == "attention":
            self._attended.append(x + y)
            return x
        return self._attended.pop() + y


def _residuals(_case: Case) -> Mapping[str, Arithmetic]:
    left_out = (("attention",), ("mlp",), ("attention", "mlp"))
    found = {"_".join(branches): Arithmetic(join=partial(_joined, branches)) for branches in left_out}
    return {"to_what_the_mlp_reads_alone": Arithmetic(join=_Parallel()), **found}


_of_activations = partial(WhatIf, explains=ACTIVATIONS, names_readings=True)
WHAT_IFS = (
    _of_activations("scores_scaled", "when attention scores are scaled by another number", by_attention(_scores)),
    _of_activations(
        "later_seen",
        "when tokens see later ones: attention is not causal",
        by_attention(lambda _case: {"all": _all_seen, "one": _next_seen}),
    ),
    _of_activations(
        "rotated_otherwise",
        "when rotary positions have another base, pairing or direction, or turn queries or keys alone",
        by_arithmetic(
            lambda case: {reading: Arithmetic(rotate=rotate) for reading, rotate in _rotations(case).items()}
        ),
    ),
    _of_activations("other_activation", "with another nonlinearity", by_arithmetic(_nonlinearities)),
    _of_activations(
        "normed_otherwise",
        "with another norm: left out, centred or not, or with other weights",
        by_arithmetic(lambda case: {reading: Arithmetic(norm=norm) for reading, norm in _norms(case).items()}),
    ),
    _of_activations(
        "other_epsilon",
        "when the norms have another epsilon",
        by_arithmetic(
            lambda _case: {f"{epsilon:g}": Arithmetic(norm=partial(_norm, epsilon=epsilon)) for epsilon in _EPSILONS}
        ),
    ),
    _of_activations("term_missing", "when a residual is not added", by_arithmetic(_residuals)),
)
