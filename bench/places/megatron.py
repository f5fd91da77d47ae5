"""Unmodified Megatron-Core with patches that are bugs on several ranks and change nothing on one: the truth's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest import mock

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import layers as linears
from megatron.core.transformer import attention, dot_product_attention, mlp, transformer_block, transformer_layer
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from shardproof import cuda_on_cpu

__all__ = ["CASE", "PATCHES", "planted"]

CASE = "tp=2 layers=2"


def _several() -> bool:
    return int(parallel_state.get_tensor_model_parallel_world_size()) > 1


@contextmanager
def _after(owner: Any, name: str, change: Callable[..., Any]) -> Iterator[None]:
    """Inside, what `owner.name` returns on several ranks is what `change(returned, *args)` makes of it."""
    original = getattr(owner, name)

    @wraps(original)
    def changed(*args: Any, **kwargs: Any) -> Any:
        returned = original(*args, **kwargs)
        return change(returned, *args) if _several() else returned

    with mock.patch.object(owner, name, changed):
        yield


@contextmanager
def _instead(owner: Any, name: str, other: Callable[..., Any]) -> Iterator[None]:
    """Inside, `owner.name` is `other(original, *args, **kwargs)` on several ranks."""
    original = getattr(owner, name)

    @wraps(original)
    def changed(*args: Any, **kwargs: Any) -> Any:
        return other(original, *args, **kwargs) if _several() else original(*args, **kwargs)

    with mock.patch.object(owner, name, changed):
        yield


def _scaled(_: Any, attention: Any, *args: Any, **kwargs: Any) -> None:
    attention.softmax_scale = 1 / attention.hidden_size_per_attention_head


def _relu(_: Any, module: Any, *args: Any, **kwargs: Any) -> None:
    module.activation_func = torch.nn.functional.relu


def _norm(_original: Any, *args: Any, **kwargs: Any) -> Any:
    return _original(*args, **{**kwargs, "eps": 1e-1})


PATCHES: dict[str, Callable[[], Any]] = {
    "no sum leaves a tensor-parallel region": lambda: _instead(
        linears, "reduce_from_tensor_model_parallel_region", lambda _, x, *args, **kwargs: x
    ),
    "row linear halves its output": lambda: _after(
        linears.RowParallelLinear, "forward", lambda found, *args: (found[0] / 2, found[1])
    ),
    "attention scaled by the head's width": lambda: _after(
        dot_product_attention.DotProductAttention, "__init__", _scaled
    ),
    "attention without its mask": lambda: _instead(
        dot_product_attention.FusedScaleMaskSoftmax,
        "forward",
        lambda original, self, scores, mask, *args, **kwargs: original(self, scores, mask & False, *args, **kwargs),
    ),
    "no column linear sums its input's gradient": lambda: _instead(
        linears, "linear_with_grad_accumulation_and_async_allreduce", _no_sum
    ),
    "a larger epsilon in the norm": lambda: _instead(WrappedTorchNorm, "__new__", _norm),
    "relu for gelu": lambda: _after(mlp.MLP, "__init__", _relu),
    "a vocabulary that begins one row too late": lambda: _instead(linears.VocabUtility, _RANGE, _late),
    "queries doubled": lambda: _after(
        attention.SelfAttention,
        "get_query_key_value_tensors",
        lambda found, *args: (found[0] * 2, *found[1:]),
    ),
    "attention without its residual": lambda: _instead(
        transformer_layer.TransformerLayer, "__init__", _without_residual
    ),
    "the MLP's output grows by half": lambda: _after(
        mlp.MLP, "forward", lambda found, *args: (found[0] * 1.5, found[1])
    ),
    "another epsilon in the last norm": lambda: _after(transformer_block.TransformerBlock, "__init__", _other_epsilon),
}
_RANGE = "vocab_range_from_global_vocab_size"


def _without_residual(original: Any, layer: Any, *args: Any, **kwargs: Any) -> None:
    original(layer, *args, **kwargs)
    add = layer.self_attn_bda
    layer.self_attn_bda = lambda *how: lambda x, residual, rate: add(*how)(x, residual * 0, rate)


def _other_epsilon(_: Any, block: Any, *args: Any, **kwargs: Any) -> None:
    block.final_layernorm.eps = 0.5


def _late(original: Any, *args: Any) -> tuple[int, int]:
    first, last = original(*args)
    return first + 1, last + 1


def _no_sum(original: Any, *args: Any, **kwargs: Any) -> Any:
    kwargs["allreduce_dgrad"] = False
    return original(*args, **kwargs)


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Inside, Megatron has this bug."""
    with ExitStack() as stack:
        stack.enter_context(cuda_on_cpu())
        stack.enter_context(PATCHES[name]())
        yield
