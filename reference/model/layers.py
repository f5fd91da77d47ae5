"""The mathematics of the layers, written plainly: tensors in, tensors out, no state.

Shape suffixes: B rows, S tokens of a row, H hidden, F ffn, D head_dim, V vocab, E any width. N query heads, K kv heads,
G query heads of one kv head (N = K*G). Matrix products run in the tensors' dtype; statistics (norms, softmax) run in
`wide` of it. Sources: layer norm, arXiv:1607.06450; RMSNorm, arXiv:1910.07467; grouped queries, arXiv:2305.13245;
SwiGLU, arXiv:2002.05202; tanh GELU as GPT-2's `gelu_new`. Rotary positions: arXiv:2104.09864 with the rotate-half
pairing of Hugging Face Llama.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional

from shardproof.reference.model.losses import wide

EPSILON = 1e-5
ROTARY_BASE = 10000.0


def look_up(table_VE: Tensor, index_BS: Tensor) -> Tensor:
    """Rows of a table."""
    return table_VE[index_BS]


def linear(x_BSE: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x @ weight^T + bias; weight is [out, in]."""
    return functional.linear(x_BSE, weight, bias)


def norm(x_E: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Layer norm over the last dim when there is a bias, RMSNorm when there is none; any leading dims."""
    y = x_E.to(wide(x_E.dtype))
    if bias is not None:
        y = y - y.mean(-1, keepdim=True)
    y = y / (y.square().mean(-1, keepdim=True) + EPSILON).sqrt() * weight.to(y.dtype)
    if bias is not None:
        y = y + bias.to(y.dtype)
    return y.to(x_E.dtype)


def squares(x: Tensor) -> Tensor:
    """The sum of all squares, a scalar."""
    return x.square().sum()


def activate(kind: str, x_BSF: Tensor, gate_BSF: Tensor | None = None) -> Tensor:
    """The MLP's nonlinearity: tanh GELU or ReLU of x, or SiLU(gate) * x for swiglu."""
    if gate_BSF is not None:
        return functional.silu(gate_BSF) * x_BSF
    return functional.gelu(x_BSF, approximate="tanh") if kind == "gelu" else functional.relu(x_BSF)


def weigh(x_TF: Tensor, weights_T: Tensor) -> Tensor:
    """Every row times its weight, such as that of an expert."""
    return x_TF * weights_T[:, None]


def split_qkv(x_BSE: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """The fused projection as queries [B,S,N,D], keys and values [B,S,K,D].

    Its last dim holds, per kv group, the group's queries, then its key, then its value.
    """
    group = heads // kv_heads
    x_BSKgD = x_BSE.unflatten(-1, (kv_heads, group + 2, -1))
    return x_BSKgD[..., :group, :].flatten(2, 3), x_BSKgD[..., group, :], x_BSKgD[..., group + 1, :]


def rotate(x_BSND: Tensor, positions_BS: Tensor) -> Tensor:
    """Rotary positions: the pair (i, i + D/2) turns by position / base^(2i/D)."""
    half = x_BSND.shape[-1] // 2
    power = torch.arange(half, dtype=torch.float64, device=x_BSND.device) / half
    angle_BS1h = (positions_BS[..., None] / ROTARY_BASE**power)[:, :, None]
    x = x_BSND.to(wide(x_BSND.dtype))
    cos, sin = angle_BS1h.cos().to(x.dtype), angle_BS1h.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x_BSND.dtype)


def visible(length: int, cu_seqlens: Tensor | None, device: torch.device) -> Tensor:
    """Bool [S, S], true where a token (row) may see another (column): an earlier one, of the same sentence when packed.

    `cu_seqlens` int64 [n+1] holds the sentences' bounds inside a packed row, from 0 to `length`.
    """
    index = torch.arange(length, device=device)
    causal = index[:, None] >= index[None, :]
    if cu_seqlens is None:
        return causal
    sentence = torch.searchsorted(cu_seqlens.to(device), index, right=True)
    return causal & (sentence[:, None] == sentence[None, :])


def attention(
    q_BSND: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, visible_SS: Tensor, keep_BNSS: Tensor | None = None
) -> Tensor:
    """Softmax attention with grouped queries by explicit scores; returns [B, S, N * width of a value]. `keep_BNSS`
    multiplies the probabilities.
    """
    heads, head_dim = q_BSND.shape[2:]
    group = heads // k_BSKD.shape[2]
    q_BNSD = q_BSND.transpose(1, 2)
    k_BNSD = k_BSKD.repeat_interleave(group, dim=2).transpose(1, 2)
    v_BNSD = v_BSKD.repeat_interleave(group, dim=2).transpose(1, 2)
    score_BNSS = (q_BNSD @ k_BNSD.transpose(2, 3)).to(wide(q_BSND.dtype)) / math.sqrt(head_dim)
    share_BNSS = score_BNSS.masked_fill(~visible_SS, -math.inf).softmax(-1).to(q_BSND.dtype)
    if keep_BNSS is not None:
        share_BNSS = (share_BNSS * keep_BNSS).to(q_BSND.dtype)
    return (share_BNSS @ v_BNSD).transpose(1, 2).flatten(2)
