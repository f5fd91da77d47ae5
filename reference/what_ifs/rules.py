"""What-ifs of the modules: activations when attention, rotation, a norm, a nonlinearity or a residual has another rule.

Keys as in `reference.what_ifs.inputs`; activations alone, for what is wrong in backward follows from them. Every
reading is a rule that some system uses in place of the case's own, or a common slip. Letters as in
`reference.model.layers`, p parts. Sources: muP (arXiv:2203.03466) for scores over the width; Llama's two rotary
layouts; Gemma's norm weights less one; GLU variants, arXiv:2002.05202; parallel blocks, arXiv:2204.02311.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from reference.case import Case
from reference.data.batches import Batch, micro_batch
from reference.model import layers
from reference.model.decoder import Arithmetic
from reference.model.given import takes_given
from reference.training.activations import observe
from reference.training.steps import Feed
from reference.what_ifs.inputs import weights_of
from reference.what_ifs.slices import masks, other_positions

_EPSILONS = (0.0, 1e-12, 1e-8, 1e-6, 1e-3)
_BASES = (500_000.0, 1_000_000.0)


@takes_given
def rules(case: Case, device: torch.device) -> dict[str, Tensor]:
    """`act/<module>` of micro-batch 0 of step 0 under every other rule."""
    weights = weights_of(case, device)
    found: dict[str, Tensor] = {}
    for reading, arithmetic in _arithmetics(case):
        acts = observe(case, weights, arithmetic=arithmetic, gradients=False)
        found |= {f"{reading}/{name}": tensor for name, tensor in acts.items()}
    for reading, feed in other_positions(case).items():
        acts = observe(case, weights, feed=feed, gradients=False)
        found |= {f"{reading}/{name}": tensor for name, tensor in acts.items()}
    return found | _positions(case, weights)


def _positions(case: Case, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Learned positions that are left out, or those of other places."""
    if case.positions != "learned":
        return {}
    table = "embedding.positions.weight"
    left_out = observe(case, weights | {table: torch.zeros_like(weights[table])}, gradients=False)
    found = {f"positions_missing.table/{name}": tensor for name, tensor in left_out.items()}
    for by in (1, 2, -1):
        acts = observe(case, weights, feed=_shifted(by), gradients=False)
        found |= {f"positions_shifted.{by}/{name}": tensor for name, tensor in acts.items()}
    return found


def _arithmetics(case: Case) -> Iterator[tuple[str, Arithmetic]]:
    """What-if, and its reading -> the dense model's arithmetic under that rule."""
    for reading, attention in _attentions(case).items():
        yield reading, Arithmetic(attention=attention)
    for reading, rotate in _rotations(case).items():
        yield f"rotated_otherwise.{reading}", Arithmetic(rotate=rotate)
    for reading, norm in _norms(case).items():
        yield f"normed_otherwise.{reading}", Arithmetic(norm=norm)
    for epsilon in _EPSILONS:
        yield f"other_epsilon.{epsilon:g}", Arithmetic(norm=partial(_norm, epsilon=epsilon))
    for reading, nonlinearity in _NONLINEARITIES.items():
        if reading != ("silu" if case.activation == "swiglu" else case.activation):
            yield f"other_activation.{reading}", Arithmetic(activate=partial(_activate, nonlinearity))
    yield "term_missing.to_what_the_mlp_reads_alone", Arithmetic(join=_Parallel())
    for left_out in (("attention",), ("mlp",), ("attention", "mlp")):
        yield f"term_missing.{'_'.join(left_out)}", Arithmetic(join=partial(_joined, left_out))


_Attention = Callable[..., Tensor]


def _attentions(case: Case) -> dict[str, _Attention]:
    """What-if -> another core of attention."""
    root = math.sqrt(case.head_dim)
    found: dict[str, _Attention] = {
        "scores_scaled.width": partial(_scaled, factor=1 / root),
        "scores_scaled.not": partial(_scaled, factor=root),
        "scores_scaled.hidden": partial(_scaled, factor=math.sqrt(case.head_dim / case.hidden)),
        "later_seen.all": _all_seen,
        "later_seen.one": _next_seen,
    }
    found |= masks(case)
    for parts in sorted({1, case.tp}):
        if case.heads > case.kv_heads > parts and case.kv_heads % parts == 0:
            found[f"kv_order.repeated{parts}"] = partial(_repeated, parts)
    return found


def _scaled(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, *factors: Tensor, factor: float) -> Tensor:
    return layers.attention(q * factor, k, v, visible, *factors)


def _all_seen(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, *factors: Tensor) -> Tensor:
    return layers.attention(q, k, v, visible | visible.t(), *factors)


def _next_seen(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, *factors: Tensor) -> Tensor:
    following = torch.ones_like(visible).triu(1).tril(1)
    return layers.attention(q, k, v, visible | (visible.t() & following), *factors)


def _repeated(parts: int, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, *factors: Tensor) -> Tensor:
    """In each part of the heads all kv heads are repeated one after the other, not each beside its copies."""
    group = q.shape[2] // k.shape[2]
    k, v = (torch.cat([part.repeat(1, 1, group, 1) for part in x.chunk(parts, 2)], 2) for x in (k, v))
    return layers.attention(q, k, v, visible, *factors)


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


def _shifted(by: int) -> Feed:
    """Every token at a place later by a fixed shift, the last ones at the last place."""

    def feed(case: Case, step: int, micro: int, dp_rank: int, /, *, device: torch.device) -> Batch:
        batch = micro_batch(case, step, micro, dp_rank, device=device)
        return dataclasses.replace(batch, positions=(batch.positions + by).clamp(0, case.seq - 1))

    return feed
