"""Arithmetic that has the terms of every sum of a backward met (`reference.training.reach`), its results unchanged.

In backward of y = x @ W^T no part of the gradient of x exceeds |g| @ |W|. No part of that of W exceeds |g|^T @ |x|.

Letters: those of `reference.model.layers`; T rows of any kind, E inputs, F outputs.
"""

import math
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from shardproof.reference.model.decoder import Arithmetic
from shardproof.reference.training.reach import Reach


def with_terms(plain: Arithmetic, reach: Reach) -> Arithmetic:
    """This arithmetic, with all gradients of its backward counted in `reach`."""
    return replace(
        plain,
        look_up=partial(_look_up, plain, reach),
        linear=partial(_linear, plain, reach),
        norm=partial(_norm, plain, reach),
        attention=partial(_attention, plain, reach),
        activate=partial(_activate, plain, reach),
        weigh=partial(_weigh, plain, reach),
        rotate=partial(_rotate, plain, reach),
        join=partial(_join, plain, reach),
    )


def _look_up(plain: Arithmetic, reach: Reach, table_VE: Tensor, index_BS: Tensor) -> Tensor:
    y_BSE = plain.look_up(table_VE, index_BS)

    def meet(grad_BSE: Tensor) -> None:
        reach.meet_inside(grad_BSE)
        sizes = torch.zeros_like(table_VE).index_put((index_BS,), grad_BSE.abs(), accumulate=True)
        reach.meet_terms(table_VE, sizes)

    y_BSE.register_hook(meet)
    return y_BSE


def _linear(plain: Arithmetic, reach: Reach, x_BSE: Tensor, weight_FE: Tensor, bias_F: Tensor | None) -> Tensor:
    y_BSF = plain.linear(x_BSE, weight_FE, bias_F)

    def meet(grad_BSF: Tensor) -> None:
        size_TF, size_TE = grad_BSF.abs().flatten(0, -2), x_BSE.detach().abs().flatten(0, -2)
        reach.meet_inside(grad_BSF)
        reach.meet_input(x_BSE, size_TF @ weight_FE.detach().abs())
        reach.meet_terms(weight_FE, size_TF.mT @ size_TE)
        if bias_F is not None:
            reach.meet_terms(bias_F, size_TF.sum(0))

    y_BSF.register_hook(meet)
    return y_BSF


def _norm(plain: Arithmetic, reach: Reach, x_BSE: Tensor, weight_E: Tensor, bias_E: Tensor | None) -> Tensor:
    y_BSE = plain.norm(x_BSE, weight_E, bias_E)

    def meet(grad_BSE: Tensor) -> None:
        alone_BSE = x_BSE.detach().requires_grad_()  # x has other readers too
        zeros_E = None if bias_E is None else torch.zeros_like(bias_E)
        with torch.enable_grad():
            bare_BSE = plain.norm(alone_BSE, torch.ones_like(weight_E), zeros_E)
        reach.meet_inside(grad_BSE)
        reach.meet_inside(torch.autograd.grad(bare_BSE, alone_BSE, grad_BSE * weight_E.detach())[0])
        reach.meet_terms(weight_E, (grad_BSE * bare_BSE.detach()).abs().flatten(0, -2).sum(0))
        if bias_E is not None:
            reach.meet_terms(bias_E, grad_BSE.abs().flatten(0, -2).sum(0))

    y_BSE.register_hook(meet)
    return y_BSE


def _attention(
    plain: Arithmetic,
    reach: Reach,
    q_BSND: Tensor,
    k_BSKD: Tensor,
    v_BSKE: Tensor,
    visible_SS: Tensor,
    keep_BNSS: Tensor | None = None,
) -> Tensor:
    y_BSF = plain.attention(q_BSND, k_BSKD, v_BSKE, visible_SS, *(() if keep_BNSS is None else (keep_BNSS,)))

    def meet(grad_BSF: Tensor) -> None:
        """Every product of the backward of attention by sizes: what parts over heads, queries and keys stay below."""
        heads, kv_heads = q_BSND.shape[2], k_BSKD.shape[2]
        q_BNSD = q_BSND.detach().transpose(1, 2)
        k_BNSD, v_BNSE = (x.detach().repeat_interleave(heads // kv_heads, 2).transpose(1, 2) for x in (k_BSKD, v_BSKE))
        scale = 1 / math.sqrt(q_BNSD.shape[-1])
        share_BNSS = (q_BNSD @ k_BNSD.mT * scale).masked_fill(~visible_SS, -math.inf).softmax(-1)
        size_BNSE = grad_BSF.abs().unflatten(-1, (heads, -1)).transpose(1, 2)
        of_share = size_BNSE @ v_BNSE.abs().mT
        of_share = of_share if keep_BNSS is None else of_share * keep_BNSS
        of_score = share_BNSS * (of_share + (share_BNSS * of_share).sum(-1, keepdim=True))
        kept = share_BNSS if keep_BNSS is None else share_BNSS * keep_BNSS
        reach.meet_inside(of_share)
        reach.meet_inside(of_score @ k_BNSD.abs() * scale)
        for of_key in (of_score.mT @ q_BNSD.abs() * scale, kept.mT @ size_BNSE):
            reach.meet_inside(of_key.unflatten(1, (kv_heads, -1)).sum(2))

    y_BSF.register_hook(meet)
    return y_BSF


def _activate(plain: Arithmetic, reach: Reach, kind: str, x_BSF: Tensor, gate_BSF: Tensor | None) -> Tensor:
    y_BSF = plain.activate(kind, x_BSF, gate_BSF)

    def meet(grad_BSF: Tensor) -> None:
        reach.meet_inside(grad_BSF)
        if gate_BSF is not None:
            reach.meet_inside(grad_BSF * x_BSF.detach())  # in silu(gate)

    y_BSF.register_hook(meet)
    return y_BSF


def _weigh(plain: Arithmetic, reach: Reach, x_TF: Tensor, weights_T: Tensor) -> Tensor:
    y_TF = plain.weigh(x_TF, weights_T)

    def meet(grad_TF: Tensor) -> None:
        reach.meet_inside(grad_TF)
        reach.meet_inside((grad_TF * x_TF.detach()).abs().sum(-1))

    y_TF.register_hook(meet)
    return y_TF


def _rotate(plain: Arithmetic, reach: Reach, what: str, x_BSND: Tensor, positions_BS: Tensor) -> Tensor:
    y_BSND = plain.rotate(what, x_BSND, positions_BS)
    y_BSND.register_hook(reach.meet_inside)
    return y_BSND


def _join(plain: Arithmetic, reach: Reach, branch: str, x_BSH: Tensor, y_BSH: Tensor) -> Tensor:
    joined_BSH = plain.join(branch, x_BSH, y_BSH)
    joined_BSH.register_hook(reach.meet_inside)
    return joined_BSH
