"""Which tokens of a row each context rank holds, and attention of some queries over some keys.

    order        rank r of c holds                                                    work of causal attention
    contiguous   chunk r of c                                                         grows with r
    zigzag       chunks r and 2c-1-r of 2c, in this order                             equal, on each pair of ranks too

Zigzag cuts the documents of a packed row anywhere, and balances only a row that is one document. If the number of
chunks does not divide the row, the first chunks have one token more; chunks may be empty. Only `ring` takes slices of
unequal length.

Labels are shifted before anything is sliced: the label of the last token of a chunk is a token of another rank.
Positions are sliced like tokens, so rotary embeddings and masks know where a token stands in its row. Source:
Megatron-Core `get_batch_on_this_cp_rank` (around.md 12.2, 14.2); arXiv:2311.09431 (zigzag order).

Attention over disjoint sets of keys is merged into one. Letters: B rows, q queries, s keys, K kv heads, G query heads
of one kv head, D head dim. Everything is computed in the dtype of statistics (`wide`), as the accumulators of a fused
kernel are.

    one block   S = q k^T / sqrt(D), -inf where a key is hidden ; L = log sum exp S ; O = exp(S - L) v
    merge       L = log(exp L1 + exp L2) ; O = exp(L1 - L) O1 + exp(L2 - L) O2           associative, commutative
    backward    P = exp(S - L) ; dS = P * (dO v^T - sum(dO * O)) / sqrt(D) ; dq = dS k ; dk = dS^T q ; dv = P^T dO
    dropout     M = 0 or 1/(1-p) : O = (P M) v ; dO v^T becomes M * dO v^T ; dv = (P M)^T dO ; L is unchanged

Backward needs L and O *of all keys*: those of a block alone give plausible gradients that are wrong. A query that sees
no key has L = -inf and O = 0; since -inf minus -inf is no number, its weights are set to 0. Source:
arXiv:2205.14135 (softmax by blocks), arXiv:2112.05682, arXiv:2310.01889 (ring attention); around.md 14.2.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardproof.parallel.layers.block import wide


@dataclass(frozen=True, slots=True, kw_only=True)
class Slices:
    """The slices of a row of S tokens.

    held    for every rank, int64 [tokens of its own]: their places in the row, in the order in which they lie there
    hidden  bool [B or 1, S, S], true where the token of one place must not see that of the other: borders of packed
            documents, padding. None: causal
    """

    held: tuple[Tensor, ...]
    hidden: Tensor | None = None

    @property
    def gather_order(self) -> Tensor:
        """The places of all ranks, end to end: the order of a gathered tensor."""
        return torch.cat(self.held)

    def visible(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Bool [queries, keys], or [B or 1, queries, keys] with the mask's rows: may a query see a key?"""
        if self.hidden is None:
            return queries[:, None] >= keys[None, :]
        where = self.hidden.device
        return ~self.hidden[:, queries.to(where)[:, None], keys.to(where)]

    def merge_ranks(self, ranks: int) -> "Slices":
        """The slices of groups of `ranks` consecutive ranks, as if each group were one rank.

        Raises ValueError when `ranks` does not divide them.
        """
        if len(self.held) % ranks:
            raise ValueError(f"ranks={ranks}: must divide the {len(self.held)} ranks of the row; legal: ranks=1")
        groups = [self.held[first : first + ranks] for first in range(0, len(self.held), ranks)]
        return Slices(held=tuple(torch.cat(group) for group in groups), hidden=self.hidden)

    def require_equal(self, method: str) -> None:
        """Raise ValueError unless every rank holds equally many tokens, which this method needs."""
        lengths = [len(own) for own in self.held]
        if len(set(lengths)) > 1:
            raise ValueError(
                f"held: the ranks hold {lengths} tokens, and {method} needs equal slices; "
                f"legal: a row of a multiple of {len(lengths)} tokens, or the method ring"
            )


def contiguous(length: int, ranks: int) -> tuple[Tensor, ...]:
    """The places of every rank: one chunk each."""
    return torch.arange(length).tensor_split(ranks)


def zigzag(length: int, ranks: int) -> tuple[Tensor, ...]:
    """The places of every rank: a chunk from the front and its mirror image from the back."""
    chunks = torch.arange(length).tensor_split(2 * ranks)
    return tuple(torch.cat((chunks[rank], chunks[-1 - rank])) for rank in range(ranks))


def slice_row(row: Tensor, own: Tensor, *, dim: int = 1) -> Tensor:
    """This rank's part of tokens, labels, loss mask or positions [B, S], or of another tensor with the sequence along
    `dim`.
    """
    return row.index_select(dim, own.to(row.device))


Partial = tuple[Tensor, Tensor]
"""O [B,q,K,G,D] and L [B,q,K,G] over some of the keys, in the dtype of statistics."""


def attend(
    q_BqND: Tensor, k_BsKD: Tensor, v_BsKD: Tensor, visible_qs: Tensor, keep_BNqs: Tensor | None = None
) -> Partial:
    """Attention over these keys alone; `keep_BNqs` are the factors of dropout."""
    score = _scores(q_BqND, k_BsKD, visible_qs)
    total = score.logsumexp(-1)
    weight = _apply_dropout(_weights(score, total), keep_BNqs)
    return torch.einsum("bqkgs,bskd->bqkgd", weight, v_BsKD.to(score.dtype)), total


def merge_partials(one: Partial, other: Partial) -> Partial:
    """Attention over two disjoint sets of keys, merged into one."""
    total = torch.logaddexp(one[1], other[1])
    shares = [_weights(part[1][..., None], total) for part in (one, other)]
    return shares[0] * one[0] + shares[1] * other[0], total


def gradients(
    grad_BqND: Tensor,
    q_BqND: Tensor,
    k_BsKD: Tensor,
    v_BsKD: Tensor,
    visible_qs: Tensor,
    whole: Partial,
    keep_BNqs: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q [B,q,N,D] from these keys alone, and gradients of k and v [B,s,K,D] from these queries.

    `whole` is the attention over all keys. All three are in the dtype of statistics.
    """
    score = _scores(q_BqND, k_BsKD, visible_qs)
    context, total = whole
    q, grad, k, v = (
        _group_heads(q_BqND, k_BsKD),
        _group_heads(grad_BqND, k_BsKD),
        k_BsKD.to(score.dtype),
        v_BsKD.to(score.dtype),
    )
    weight = _weights(score, total)
    slope = _apply_dropout(torch.einsum("bqkgd,bskd->bqkgs", grad, v), keep_BNqs)
    inner = slope - (grad * context).sum(-1)[..., None]
    grad_score = weight * inner / math.sqrt(q.shape[-1])
    return (
        torch.einsum("bqkgs,bskd->bqkgd", grad_score, k).flatten(2, 3),
        torch.einsum("bqkgs,bqkgd->bskd", grad_score, q),
        torch.einsum("bqkgs,bqkgd->bskd", _apply_dropout(weight, keep_BNqs), grad),
    )


class _OverAllKeys(torch.autograd.Function):
    """Attention whose keys are all on this rank: one block."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, keep: Tensor | None) -> Tensor:
        context, total = attend(q, k, v, visible, keep)
        ctx.save_for_backward(q, k, v, visible, context, total, keep)
        return context.flatten(2, 3).to(q.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, visible, context, total, keep = ctx.saved_tensors
        grad_q, grad_k, grad_v = gradients(grad, q, k, v, visible, (context, total), keep)
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), None, None


def over_all_keys(
    q_BqND: Tensor, k_BsKD: Tensor, v_BsKD: Tensor, visible_qs: Tensor, keep_BNqs: Tensor | None = None
) -> Tensor:
    """Attention [B,q,N,D] of these queries; 0 for those that see no key. `keep_BNqs` are the factors of dropout."""
    context: Tensor = _OverAllKeys.apply(q_BqND, k_BsKD, v_BsKD, visible_qs, keep_BNqs)
    return context


def of_keys(keep_BNqS: Tensor | None, keys: Tensor) -> Tensor | None:
    """The factors of dropout at these places of a row; None without dropout."""
    return None if keep_BNqS is None else keep_BNqS.index_select(3, keys.to(keep_BNqS.device))


def _apply_dropout(x_BqKGs: Tensor, keep_BNqs: Tensor | None) -> Tensor:
    """Attention's shares, or their gradients, times the factors of dropout."""
    if keep_BNqs is None:
        return x_BqKGs
    factors: Tensor = keep_BNqs.transpose(1, 2).unflatten(2, x_BqKGs.shape[2:4])
    return x_BqKGs * factors


def _group_heads(x_BqND: Tensor, k_BsKD: Tensor) -> Tensor:
    """The query heads of every kv head together: [B,q,K,G,D]. Query head n reads kv head n // G."""
    x_BqKGD: Tensor = x_BqND.to(wide(x_BqND.dtype)).unflatten(2, (k_BsKD.shape[2], -1))
    return x_BqKGD


def _scores(q_BqND: Tensor, k_BsKD: Tensor, visible_qs: Tensor) -> Tensor:
    q = _group_heads(q_BqND, k_BsKD)
    score = torch.einsum("bqkgd,bskd->bqkgs", q, k_BsKD.to(q.dtype)) / math.sqrt(q.shape[-1])
    return score.masked_fill(~visible_qs.to(score.device)[..., :, None, None, :], -math.inf)


def _weights(score: Tensor, total: Tensor) -> Tensor:
    """exp(score - total), 0 for queries that see no key."""
    return (score - total.masked_fill(total == -math.inf, 0.0)[..., None]).exp()
