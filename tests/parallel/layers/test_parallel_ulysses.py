"""Attention by all-to-all: exchanged there and back nothing changes, and the core sees whole rows of its own heads."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from parallel.communication import pairs
from parallel.communication.batch import hidden_pairs
from parallel.communication.collectives import own_slice
from parallel.communication.mesh import Axis
from parallel.layers.attention import core_attention
from parallel.layers.ulysses import by_all_to_all
from tests.parallel.ranks import Calls, along_tp, numbers


def _run(axis: Axis, full: list[Tensor], hidden_B1SS: Tensor | None) -> list[Tensor]:
    """Context and the gradients of q, k, v of this rank's tokens, when the context's gradient is its own cosine."""
    q, k, v = (own_slice(x, axis, dim=1).clone().requires_grad_() for x in full)
    context = by_all_to_all(axis)(lambda q, k, v: core_attention(q, k, v, hidden_B1SS), q, k, v)
    return [context.detach(), *torch.autograd.grad(context, (q, k, v), context.detach().cos())]


def _dense(full: list[Tensor], hidden_B1SS: Tensor | None) -> list[Tensor]:
    q, k, v = (x.clone().requires_grad_() for x in full)
    context = core_attention(q, k, v, hidden_B1SS)
    return [context.detach(), *torch.autograd.grad(context, (q, k, v), context.detach().cos())]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("ranks", "heads", "kv_heads"), [(2, 4, 4), (2, 4, 2), (4, 8, 2), (4, 4, 1), (3, 6, 3), (3, 6, 1), (1, 4, 2)]
)
def test_exchanged_attention_is_attention(ranks: int, heads: int, kv_heads: int, packed: bool) -> None:
    """Fewer kv heads than ranks included; packed rows have borders inside of every rank's slice and across slices."""
    rows, length = (1, 24) if packed else (2, 12)
    full = [numbers(rows, length, n, 2, seed=i) for i, n in enumerate((heads, kv_heads, kv_heads))]
    hidden = hidden_pairs(length, torch.tensor([0, 5, 14, 24]), torch.device("cpu")) if packed else None
    found = along_tp(ranks, lambda axis: _run(axis, full, hidden))
    for parts, expected in zip(zip(*found, strict=True), _dense(full, hidden), strict=True):
        torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-12, atol=1e-12)


@settings(max_examples=25, deadline=None)
@given(
    ranks=st.sampled_from((2, 3, 4)),
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)),
    seed=st.integers(0, 2**16),
)
def test_an_all_to_all_and_its_inverse_are_the_identity(
    ranks: int, sizes: tuple[int, int, int, int], seed: int
) -> None:
    """Bit for bit, and so are their gradients: data only moves."""
    rows, tokens, heads, dim = sizes
    x = numbers(rows, tokens * ranks, heads * ranks, dim, seed=seed)

    def program(axis: Axis) -> bool:
        own = own_slice(x, axis, dim=1).requires_grad_()
        exchanged = pairs.all_to_all(own, axis, split_dim=2, gather_dim=1)
        back = pairs.all_to_all(exchanged, axis, split_dim=1, gather_dim=2)
        (gradient,) = torch.autograd.grad(back, own, own.detach() * 3)
        whole = torch.equal(exchanged, own_slice(x, axis, dim=2))
        return whole and torch.equal(back, own) and torch.equal(gradient, own * 3)

    assert all(along_tp(ranks, program))


@settings(max_examples=15, deadline=None)
@given(
    mesh=st.sampled_from(((2, 1), (2, 2), (3, 1), (4, 2), (4, 1))),
    group=st.integers(1, 2),
    rows=st.integers(1, 3),
    seed=st.integers(0, 2**16),
)
def test_a_core_that_copies_gets_its_own_tokens_back(mesh: tuple[int, int], group: int, rows: int, seed: int) -> None:
    """q there and back is q; k and v reach the rank whose query heads read them, repeated when they are too few."""
    ranks, kv_heads = mesh
    heads = max(ranks, kv_heads) * group
    q, k, v = (numbers(rows, 2 * ranks, n, 2, seed=seed + n) for n in (heads, kv_heads, kv_heads))

    def program(axis: Axis) -> bool:
        def core(q_own: Tensor, k_own: Tensor, v_own: Tensor) -> Tensor:
            mine = torch.arange(heads).chunk(ranks)[axis.rank]
            read = (mine // (heads // kv_heads)).unique()
            assert torch.equal(q_own, q[:, :, mine])
            assert torch.equal(k_own, k[:, :, read]) and torch.equal(v_own, v[:, :, read])
            return q_own

        own = [own_slice(x, axis, dim=1) for x in (q, k, v)]
        return torch.equal(by_all_to_all(axis)(core, *own), own[0])

    assert all(along_tp(ranks, program))


def test_calls_and_bytes_are_those_of_the_formula() -> None:
    """modes.md 3.5: rank sends (T/sp)*e*(h + 2*max(kv, sp)*d + h) a pass, in three calls; q and kv are asynchronous."""
    rows, length, heads, kv_heads, dim, ranks = 2, 8, 8, 2, 3, 4
    full = [numbers(rows, length, n, dim, seed=n) for n in (heads, kv_heads, kv_heads)]
    calls = Calls()
    along_tp(ranks, lambda axis: _run(axis, full, None), observer=calls)
    tokens = rows * length // ranks
    q, kv = tokens * heads * dim * 8, tokens * 2 * max(kv_heads, ranks) * dim * 8
    for rank in range(ranks):
        mine = calls.by_rank[rank]
        assert [(call.op, call.payload_bytes) for call in mine[:3]] == [("all_to_all", size) for size in (q, kv, q)]
        assert sorted(call.payload_bytes for call in mine[3:]) == sorted([q, kv, q])
        assert [call.is_async for call in mine[:3]] == [True, True, False]
