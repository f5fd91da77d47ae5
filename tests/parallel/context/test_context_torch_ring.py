"""Tests of context/scheme. torch's own ring attention beside ours, on the same zigzag slices: numbers, calls and
bytes.

Differences are named: torch merges in float32 unless `convert_to_f32` is off, and its gradients of keys travel in it.
"""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from shardproof.parallel.communication.layout import Axis
from shardproof.parallel.context.blocks import Slices, zigzag
from tests.parallel.context.rows import METHODS, error, full_row, on_axis
from tests.parallel.ranks import Calls

theirs: Any = pytest.importorskip(
    "torch.distributed.tensor.experimental._context_parallel._attention", reason="this torch has no ring attention"
)
pytestmark = pytest.mark.filterwarnings("ignore")

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class TorchRing(torch.autograd.Function):
    """The two loops of torch around its fused kernel for the CPU; tensors [B, heads, tokens, D]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: Any) -> Tensor:
        def kernel(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> tuple[Tensor, Tensor]:
            output, total = _FORWARD(q, k, v, 0.0, is_causal)
            return output, total

        output, total = theirs._templated_ring_attention(group, 2, kernel, q, k, v, is_causal=True)
        ctx.save_for_backward(q, k, v, output, total)
        ctx.group = group
        found: Tensor = output
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        def kernel(*, query: Tensor, key: Tensor, value: Tensor, out: Tensor, **words: Any) -> tuple[Tensor, ...]:
            found: tuple[Tensor, ...] = _BACKWARD(
                words["grad_out"], query, key, value, out, words["logsumexp"], 0.0, words["is_causal"]
            )
            return found

        q, k, v, output, total = ctx.saved_tensors
        grads = theirs._templated_ring_attention_backward(
            ctx.group, 2, kernel, grad.contiguous(), "grad_out", q, k, v, output, total, is_causal=True
        )
        return *grads[:3], None


def torch_ring(q: Tensor, k: Tensor, v: Tensor, *, axis: Axis, slices: Slices) -> Tensor:
    context: Tensor = TorchRing.apply(*(x.transpose(1, 2).contiguous() for x in (q, k, v)), axis.group)
    return context.transpose(1, 2)


def _both(monkeypatch: pytest.MonkeyPatch, ranks: int, *, in_float32: bool) -> tuple[float, Calls]:
    """The largest distance of torch's ring from ours, and torch's calls."""
    monkeypatch.setattr(theirs._cp_options, "convert_to_f32", in_float32)
    monkeypatch.setattr(theirs._cp_options, "rotate_method", theirs._RotateMethod.ALL_TO_ALL)
    full = full_row(2, 8 * ranks, 4, 4)
    slices = Slices(held=zigzag(8 * ranks, ranks))
    found = on_axis(torch_ring, full, slices, observer=(calls := Calls()))
    return max(error(found, on_axis(METHODS["ring"], full, slices)).values()), calls


@pytest.mark.parametrize("ranks", [2, 4])
def test_numbers_and_bytes_are_torchs(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where we send a message and receive one, torch exchanges by all-to-all: as many hops, of the same bytes."""
    far, calls = _both(monkeypatch, ranks, in_float32=False)
    assert far < 1e-12
    keys = 2 * 8 * 4 * 3 * 8
    sent = Counter({2 * keys: 3 * ranks - 2})  # c-1 hops forward, c-1 and c backward
    for rank in range(ranks):
        assert {call.op for call in calls.by_rank[rank]} == {"all_to_all"}
        assert Counter(call.payload_bytes for call in calls.by_rank[rank]) == sent


def test_torchs_default_misses_the_limits_of_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    far, _ = _both(monkeypatch, 2, in_float32=True)
    assert 1e-9 < far < 1e-5
