"""DeepSpeed's own slicing, called for every rank: what the tests compare our slices with."""

import warnings
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor


@cache
def deepspeed() -> SimpleNamespace:
    """The functions by name; skips the calling test when DeepSpeed is not installed.

    DeepSpeed warns when it is imported, and looks for an accelerator unless one is named.
    """
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setenv("DS_ACCELERATOR", "cpu")
        warnings.simplefilter("ignore")
        pytest.importorskip("deepspeed", reason="deepspeed (extra `peers`) is not installed", exc_type=ImportError)
        from deepspeed.module_inject import auto_tp, fusedqkv_utils, tp_shard  # noqa: PLC0415
        from deepspeed.ops.transformer.inference import config, ds_attention, op_binding  # noqa: PLC0415
    return SimpleNamespace(
        slicing=auto_tp.ReplaceWithTensorSlicing,
        fused=fusedqkv_utils.prepare_tp_fused_qkvw,
        shared=fusedqkv_utils.shared_qk_value_head_ids,
        meta=tp_shard.AutoTPMeta,
        sizes=tp_shard.get_shard_size_list,
        config=config.DeepSpeedInferenceConfig,
        attention=ds_attention.DeepSpeedSelfAttention,
        op=op_binding.base.BaseOp,
    )


class Named(torch.nn.Module):
    """A layer whose class has this name, which is all that the fused types look at."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.attn = SimpleNamespace(split_size=0)

    def __repr__(self) -> str:
        return f"{self.name}()"


def copied(call: str, src: Tensor, dst: tuple[int, ...], ranks: int, orientation: str, **words: Any) -> list[Tensor]:
    """`strided_copy` or `copy` of every rank into buffers of this shape."""
    found = []
    outward = orientation == "out-in"
    for rank in range(ranks):
        replace = deepspeed().slicing(mp_size=ranks, out_dim=0 if outward else 1, in_dim=1 if outward else 0)
        replace.gpu_index = rank
        part = getattr(replace, call)(torch.empty(dst, dtype=src.dtype), src, int8=outward, **words)
        found.append(part.data)
    return found


def numbered(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.int64).view(shape).to(dtype)


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
