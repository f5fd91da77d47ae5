"""How far the scaled gradients of one step reach, whatever parts an implementation computes and adds them in.

    least   some tensor of float16 holds a number of at least this size: above float16 the step is skipped, surely
    bound   no tensor of float16 holds a larger number: below float16 no step is skipped

No part of a sum is larger than the sum of its terms' sizes (the triangle inequality). Two facts say what the terms are.
A matrix product, or a sum of rows, of one rank adds up in float32 and is rounded once. Its terms are the micro-batches'
gradients, and their rows only where ranks share rows. A look-up adds the rows of its gradient in the table's dtype.

`with_terms` gives arithmetic with the same results that records the terms of every sum in backward. In backward of
y = x @ W^T no part of the gradient of x exceeds |g| @ |W|, and no part of that of W exceeds |g|^T @ |x|.

Letters: those of `reference.model.layers`; T rows of any kind, E inputs, F outputs.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from shardproof.reference.case import Case
from shardproof.reference.language.core import MODES
from shardproof.reference.model.decoder import Arithmetic

_COLUMNS_AND_ROWS = frozenset({"wqkv", "wq", "wk", "wv", "wo", "w1", "w2", "w3", "w13"})
Address = tuple[int, tuple[int, ...]]


@dataclass(slots=True, kw_only=True)
class Reach:
    """Records the sizes of a step's scaled gradients, and of the terms that the arithmetic of `with_terms` meets.

    `finite` says whether all gradients of parameters so far are finite.
    """

    case: Case
    finite: bool = True
    _logits: float = 0.0
    _inside: float = 0.0
    _before: dict[str, Tensor] = field(default_factory=dict)
    _parts: dict[str, float] = field(default_factory=dict)
    _inputs: dict[Address, Tensor] = field(default_factory=dict)
    _terms: dict[Address, Tensor] = field(default_factory=dict)
    _sums: dict[Address, Tensor] = field(default_factory=dict)

    def meet_logits(self, gradient: Tensor) -> None:
        """Record the gradient of a micro-batch's logits, which a rank with the logits holds."""
        self._logits = max(self._logits, _size(gradient))

    def meet_inside(self, gradient: Tensor) -> None:
        """Record a gradient inside the model, or bounds of its parts."""
        self._inside = max(self._inside, _size(gradient))

    def meet_input(self, x: Tensor, sizes: Tensor) -> None:
        """Record the sizes of the terms of the gradient of x, which several linears may read."""
        self.meet_inside(_put(self._inputs, x, sizes))

    def meet_terms(self, parameter: Tensor, sizes: Tensor) -> None:
        """Add the sizes of the terms of a parameter's gradient, of which every row that uses it gives one."""
        _put(self._terms, parameter, sizes)

    def meet_sums(self, parameters: Mapping[str, Tensor]) -> None:
        """Record the parameters' gradients so far; what came since the last call is of the last micro-batch."""
        for name, parameter in parameters.items():
            assert parameter.grad is not None
            summed, address = parameter.grad.detach().clone(), _address(parameter)
            part = summed - self._before[name] if name in self._before else summed
            self.finite = self.finite and bool(torch.isfinite(summed).all())
            self._parts[name] = max(self._parts.get(name, 0.0), _size(part))
            self._before[name] = summed
            terms = self._terms.pop(address, None)
            if not self._is_widened(name):
                self._add(address, part.abs() if terms is None or self._is_whole(name) else terms)
        for address, terms in self._terms.items():  # of experts, which are views of one tensor
            self._add(address, terms)
        self._terms.clear()
        self._inputs.clear()

    def _add(self, address: Address, terms: Tensor) -> None:
        former = self._sums.get(address)
        if former is None:
            self._sums[address] = terms
        else:
            self._sums[address] = former + terms if self._adds_up else torch.maximum(former, terms)

    @property
    def least(self) -> float:
        """Some tensor of float16 has a number of at least this size."""
        of_parameters = map(self._least_of, self._before)
        return max(self._logits, *of_parameters)

    @property
    def bound(self) -> float:
        """No element of the float16 tensors is larger than this."""
        case = self.case
        kept = 1 - max(case.dropout, case.attention_dropout)  # what a mask drops is scaled before it is dropped
        experts = max(1, case.top_k) if case.experts else 1  # a token's gradient is the sum of its experts'
        return max(self._logits, self._inside * experts / float(kept), *map(_size, self._sums.values()))

    def _least_of(self, name: str) -> float:
        """The `least` of one parameter's gradient: the largest of n parts of a sum is at least an n-th of it."""
        case = self.case
        if case.grad_dtype == "model":
            return _size(self._before[name])
        if case.experts or (case.wgrad != "plain" and self._before[name].dim() > 1):  # ranks of experts mix data ranks
            return 0.0
        readers = 2 if name.startswith(("embedding", "head")) and (case.tied or case.prediction_depth) else 1
        return self._parts[name] / (1 if self._is_whole(name) else readers * case.tp * case.cp)

    def _is_whole(self, name: str) -> bool:
        """Whether one rank has all rows of a micro-batch from which this parameter's gradient comes, each once.

        Context ranks, isp and dispatchers of experts divide rows among ranks, and a table may be used twice. With
        sequence parallelism only column and row linears see all rows; norms of heads see only a rank's own heads.
        """
        case, mode, parts = self.case, MODES[self.case.mode], name.split(".")
        again = parts[0] == "embedding" or (parts[0] == "head" and case.prediction_depth > 0)
        if case.cp > 1 or mode.gathers_weights or case.experts or again:
            return False
        return case.tp == 1 or _is_linear(name) or not (mode.sequence or parts[-2] in ("q_norm", "k_norm"))

    def _is_widened(self, name: str) -> bool:
        """Whether the products for this gradient are in float32 from the start."""
        case = self.case
        linear = _is_linear(name) and not (case.experts or name.startswith("prediction"))
        return case.wgrad != "plain" and case.grad_dtype == "float32" and linear

    @property
    def _adds_up(self) -> bool:
        """Whether float16 holds sums of several micro-batches, also over data ranks that share weights."""
        case = self.case
        return bool(case.grad_dtype == "model" or case.experts or MODES[case.mode].gathers_weights)


def _is_linear(name: str) -> bool:
    parts = name.split(".")
    return parts[-1] == "weight" and (parts[-2] in _COLUMNS_AND_ROWS or name == "head.weight")


def _put(sums: dict[Address, Tensor], tensor: Tensor, sizes: Tensor) -> Tensor:
    address = _address(tensor)
    sums[address] = total = sums[address] + sizes if address in sums else sizes
    return total


def _address(parameter: Tensor) -> Address:
    return parameter.data_ptr(), tuple(parameter.shape)


def _size(gradient: Tensor) -> float:
    return float(gradient.abs().max()) if gradient.numel() else 0.0


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
