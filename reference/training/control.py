"""The control run: the same dense training with every sum taken in another order, in the run dtype.

Its distance from the truth shows how far rounding alone may carry a right implementation.

Each contraction is cut into as many partial sums as the case has ranks along its split. A linear's forward is cut along
inputs, the gradient of its input along outputs, the gradient of its weight along tokens; attention is cut along
features of a head and along keys. Each partial sum is rounded to the run dtype. The partial sums and the micro-batches
are added last first. Nothing here is parallel: one process has dense weights.

torch's own kernels take a few sums one term after the other, and no order rounds more than that. The control run takes
these sums by the same kernels: the gradients of a norm's weight and bias
(aten/src/ATen/native/cpu/layer_norm_kernel.cpp), and the squares of a gradient in its norm (`torch.linalg.vector_norm`,
which `clip_grad_norm_` takes).

The derivative of relu jumps from 0 to 1 at zero, its kink. An element within rounding of zero passes its gradient on in
one right implementation and not in the next, and the control run may take the same side as either. So all elements near
zero (within BAND epsilons of the run dtype, times the rms of the tensor) are taken to one side in backward, then to the
other. The change of the gradients is what the kink may cause. In float64 no element is that near.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from shardproof.reference.case import Case
from shardproof.reference.errors import CaseError
from shardproof.reference.model import layers
from shardproof.reference.model.decoder import Arithmetic
from shardproof.reference.model.losses import wide
from shardproof.reference.model.parameters import LastRead, weights
from shardproof.reference.model.randomness import takes_given
from shardproof.reference.training.steps import train


@takes_given
def control(
    case: Case,
    device: torch.device,
    *,
    parts: int = 0,
    states: Mapping[str, Tensor] | None = None,
    observed: tuple[int, int] = (0, 0),
) -> dict[str, Tensor]:
    """Dense training in the case's dtype, with the sums in another order: its outcome, and the activations of the
    `observed` step and micro-batch.

    `parts`: the number of partial sums (see `reorder_sums`). `states`: the states from which every step begins
    (`reference.training.steps`). `given`: see `reference.training.truth`.
    """
    other = reorder_sums(case, parts)
    return train(case, LastRead(case, device), arithmetic=other, last_first=True, states=states, observed=observed)


def reorder_sums(case: Case, parts: int = 0) -> Arithmetic:
    """The sums of linears, norms and attention in `parts` parts; with 0 in as many as the case splits them into, at
    least 2.

    With an even number of `parts` attention is torch's fused kernel, whose backward sums in another order. Otherwise
    attention of a case with context ranks is merged from blocks, as the ranks compute it.
    """
    attention = fused_attention if parts and parts % 2 == 0 and not case.attention_dropout else None
    by_hand = merged_attention if case.is_sliced else split_attention
    parts = parts or max(2, case.tp, case.wp)
    return Arithmetic(
        linear=partial(split_linear, parts=parts),
        norm=partial(split_norm, parts=parts),
        attention=attention or partial(by_hand, parts=parts),
        squares=squares_in_turn,
    )


def split_linear(x_BSE: Tensor, weight: Tensor, bias: Tensor | None, *, parts: int) -> Tensor:
    """The linear layer by `parts` partial sums over inputs and over outputs, and by two blocks of tokens."""
    product: Tensor = _SplitProduct.apply(x_BSE.flatten(0, -2), weight, parts)
    y_BSF = product.view(*x_BSE.shape[:-1], len(weight))
    return y_BSF if bias is None else y_BSF + bias


class _SplitProduct(torch.autograd.Function):
    """x [T, E] and weight [F, E] -> x @ weight^T [T, F], each of its three contractions by partial sums."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, parts: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.parts = parts
        return _in_parts(x, weight, parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, _ = ctx.needs_input_grad
        return (
            _in_parts(grad, weight.mT, ctx.parts) if of_x else None,
            _in_parts(grad.mT, x.mT, 2) if of_weight else None,
            None,
        )


def split_attention(
    q_BSND: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, visible_SS: Tensor, keep_BNSS: Tensor | None = None, *, parts: int
) -> Tensor:
    """Attention as `layers` has it, but its scores take blocks of keys, and `parts` partial sums over features."""
    score_BNSS, v_BNSD = _scores(q_BSND, k_BSKD, v_BSKD, visible_SS, parts)
    share_BNSS = score_BNSS.softmax(-1).to(q_BSND.dtype)
    if keep_BNSS is not None:
        share_BNSS = (share_BNSS * keep_BNSS).to(q_BSND.dtype)
    return _sum_of_products(share_BNSS, _parts(v_BNSD.mT, parts, -1)).transpose(1, 2).flatten(2)


def merged_attention(
    q_BSND: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, visible_SS: Tensor, keep_BNSS: Tensor | None = None, *, parts: int
) -> Tensor:
    """Attention by merged blocks of keys: a probability is exp(score - log sum exp).

    The gradient of a score subtracts sum(dO * O). For large scores that rounds more than a softmax, which subtracts the
    largest score first. Source: FlashAttention-2 (arXiv:2307.08691); context parallelism takes its backward.
    """
    score_BNSS, v_BNSD = _scores(q_BSND, k_BSKD, v_BSKD, visible_SS, parts)
    context_BNSD: Tensor = _Merged.apply(score_BNSS, v_BNSD, keep_BNSS, parts)
    return context_BNSD.transpose(1, 2).flatten(2)


class _Merged(torch.autograd.Function):
    """Scores [B, N, S, S] of hidden keys -inf and values [B, N, S, D] -> context [B, N, S, D]."""

    @staticmethod
    def forward(ctx: Any, score: Tensor, v: Tensor, keep: Tensor | None, parts: int) -> Tensor:
        share = (score - score.logsumexp(-1, keepdim=True)).exp()
        kept = (share if keep is None else share * keep).to(v.dtype)
        context = _sum_of_products(kept, _parts(v.mT, parts, -1))
        ctx.save_for_backward(share, kept, v, context, keep)
        return context

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        share, kept, v, context, keep = ctx.saved_tensors
        of_share = (grad @ v.mT).to(share.dtype)
        of_share = of_share if keep is None else of_share * keep
        off = (grad.to(share.dtype) * context.to(share.dtype)).sum(-1, keepdim=True)
        return share * (of_share - off), kept.mT @ grad, None, None


def _scores(q_BSND: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, visible_SS: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    """(scores [B, N, S, S] in the dtype of statistics, hidden ones -inf; values [B, N, S, D] of every head)."""
    heads, head_dim = q_BSND.shape[2:]
    q_BNSD = q_BSND.transpose(1, 2)
    k_BNSD, v_BNSD = (x.repeat_interleave(heads // x.shape[2], dim=2).transpose(1, 2) for x in (k_BSKD, v_BSKD))
    scores = [_sum_of_products(q_BNSD, _parts(keys, parts, -1)) for keys in _parts(k_BNSD, parts, 2)]
    score_BNSS = torch.cat(scores, -1).to(wide(q_BSND.dtype)) / math.sqrt(head_dim)
    return score_BNSS.masked_fill(~visible_SS, -math.inf), v_BNSD


def fused_attention(q_BSND: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, visible_SS: Tensor) -> Tensor:
    """Attention as `layers` has it, but by torch's fused kernel: softmax and its gradient block by block."""
    group = q_BSND.shape[2] // k_BSKD.shape[2]
    k_BNSD, v_BNSD = (x.repeat_interleave(group, dim=2).transpose(1, 2) for x in (k_BSKD, v_BSKD))
    context_BNSD = functional.scaled_dot_product_attention(q_BSND.transpose(1, 2), k_BNSD, v_BNSD, attn_mask=visible_SS)
    return context_BNSD.transpose(1, 2).flatten(2)


def _in_parts(x_TE: Tensor, rows_FE: Tensor, parts: int) -> Tensor:
    """x @ rows^T, its sums over E in `parts`."""
    return _sum_of_products(x_TE, _parts(rows_FE, parts, -1))


def _sum_of_products(x_TE: Tensor, columns: Sequence[Tensor]) -> Tensor:
    """x @ rows^T for rows that are cut into these columns: one product for each, added last first."""
    pairs = zip(_parts(x_TE, len(columns), -1), columns, strict=True)
    *rest, total = [_product(x, piece) for x, piece in pairs]
    for product in reversed(rest):
        total = total + product
    return total


def _product(x_TE: Tensor, rows_FE: Tensor) -> Tensor:
    """x @ rows^T. 16-bit numbers use the kernel for float32, rounded once at the end, as tensor cores do. On a CPU
    without 16-bit products, torch's own kernels take ten to twenty times as long (2.13, 100 x 48 x 84 elements).
    """
    if x_TE.dtype.itemsize > 2:
        return x_TE @ rows_FE.mT
    return (x_TE.float() @ rows_FE.float().mT).to(x_TE.dtype)


def split_norm(x_BSE: Tensor, weight: Tensor, bias: Tensor | None, *, parts: int) -> Tensor:
    """The norm by torch's kernel and `parts` blocks of tokens.

    The gradients of its parameters are `parts` sums of rows that are added one after the other.
    """
    exact = wide(x_BSE.dtype)

    def norm(x_TE: Tensor) -> Tensor:  # each block's gradients are rounded to the parameters' dtype before they add up
        scale = weight.to(exact)
        if bias is None:
            return functional.rms_norm(x_TE, scale.shape, scale, layers.EPSILON)
        return functional.layer_norm(x_TE, scale.shape, scale, bias.to(exact), layers.EPSILON)

    blocks = _parts(x_BSE.flatten(0, -2).to(exact), parts, 0)
    return torch.cat([norm(block) for block in blocks]).to(x_BSE.dtype).view(x_BSE.shape)


def squares_in_turn(x: Tensor) -> Tensor:
    """The sum of squares in the order of torch's norm kernel: one after the other."""
    size: Tensor = torch.linalg.vector_norm(x)
    return size.square()


def _parts(x: Tensor, parts: int, dim: int) -> tuple[Tensor, ...]:
    """x.tensor_split(parts, dim), whose backward makes one gradient of x's size, not one for each part."""
    size, longer = divmod(x.shape[dim], parts)
    return torch.split(x, [size + 1] * longer + [size] * (parts - longer), dim)


BAND = 4.0
"""How far the sum of a few layers may be wrong, in epsilons of the run dtype times the rms of the tensor."""


class _Moved(torch.autograd.Function):
    """relu in forward; in backward the derivative of a relu whose kink is at `place`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, place: float) -> Tensor:
        ctx.save_for_backward(x > place * x.square().mean().sqrt())
        return x.relu()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (open_,) = ctx.saved_tensors
        return grad * open_, None


@takes_given
def measure_relu_flips(
    case: Case, device: torch.device, *, side: int, states: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """The change of every float of the outcome and the activations when the kink moves to this side (1, -1).

    `states`: those from which every step begins (see reference.training.steps). `given`: see
    reference.training.truth. Empty without a relu, and in float64.
    """
    if case.activation != "relu" or case.dtype == "float64":
        return {}
    exact = {name: weight.to(torch.float64) for name, weight in weights(case, device).items()}
    both = (Arithmetic(), flip_relus(case, side))
    here, there = (train(case, exact, arithmetic=each, states=states, observed=(0, 0)) for each in both)
    return {name: there[name] - value for name, value in here.items() if value.is_floating_point()}


def flip_relus(case: Case, side: int) -> Arithmetic:
    """Arithmetic with the kink of relu moved to this side (1, -1) of all elements that rounding may carry across it."""
    return Arithmetic(activate=partial(_activate, place=side * BAND * torch.finfo(getattr(torch, case.dtype)).eps))


def refuse_decisive(
    case: Case, weights: Mapping[str, Tensor], outcome: Mapping[str, Tensor], states: Mapping[str, Tensor] | None
) -> None:
    """Raise CaseError if a relu that rounding flips may decide whether a step of this outcome is skipped."""
    if case.scaler == "none" or case.activation != "relu":
        return
    for side in (1, -1):
        other = train(case, weights, arithmetic=flip_relus(case, side), states=states, dtype=torch.float64)
        for name in (f"skipped/{step}" for step in range(case.steps)):
            if other[name] != outcome[name]:
                rule = f"rounding decides {name}: it flips a relu"
                raise CaseError("loss_scale", case.loss_scale, rule, f"loss_scale={max(1.0, case.loss_scale / 4)}")


def _activate(kind: str, x_BSF: Tensor, gate_BSF: Tensor | None, *, place: float) -> Tensor:
    if kind != "relu" or gate_BSF is not None:
        return layers.activate(kind, x_BSF, gate_BSF)
    y_BSF: Tensor = _Moved.apply(x_BSF, place)
    return y_BSF
