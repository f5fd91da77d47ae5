"""Folders of other systems: which system wrote one, and its parameters in the names of the dense model.

    Hugging Face      config.json and files of safetensors, as `save_pretrained` writes them
    Megatron-Core     metadata.json and files of torch's format, as `dist_checkpointing.save` writes them

Parameters alone are read.
"""

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from shardproof.reference.checkpoints import hugging_face, megatron
from shardproof.reference.checkpoints.fused import Unfit, joined, kv_heads_of, parted
from shardproof.reference.errors import CaseError


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """The form of parameters: query, key and value as one tensor, gate and up as one.

    Then key and value heads (0: as in the folder) and rows of the vocabulary without padding (0: all of the folder).
    """

    fuse_qkv: bool
    fuse_mlp: bool
    kv_heads: int = 0
    vocab: int = 0


def is_foreign(folder: Path) -> bool:
    """Whether another system wrote a folder."""
    return hugging_face.is_hugging_face(folder) or megatron.is_megatron(folder)


def parameters(folder: Path, form: Form) -> dict[str, Tensor]:
    """Every parameter of another system's folder in full, by its name in the dense model.

    Raises CaseError for a model that is unknown or has other key and value heads, and for tensors that do not fit one
    another. So do files that cannot be read, and heads that are needed and stated nowhere.
    """
    try:
        if megatron.is_megatron(folder):
            stored = megatron.read(folder, vocab=form.vocab)
            kv_heads = _kv_heads(kv_heads_of(stored), form.kv_heads)
            if not form.fuse_qkv and kv_heads == 0:
                rule = "holds query, key and value in one tensor, and nothing says of how many heads"
                raise CaseError("load", str(folder), rule, "a checkpoint of fuse_qkv=true beside it")
            parts = parted(stored, kv_heads, qkv=kv_heads > 0)
        else:
            config = hugging_face.config_of(folder)
            kv_heads = _kv_heads(hugging_face.heads(config)[1], form.kv_heads)
            parts = hugging_face.read(folder, config)
        return joined(parts, kv_heads, qkv=form.fuse_qkv, mlp=form.fuse_mlp)
    except Unfit as problem:
        raise CaseError("load", str(folder), problem.rule, problem.legal) from problem


def _kv_heads(stated: int, wanted: int) -> int:
    """The key and value heads that a folder says, or those of the form where it does not."""
    if 0 not in (stated, wanted) and stated != wanted:
        raise Unfit(f"has {stated} key and value heads, not {wanted}", f"kv_heads={stated}")
    return stated or wanted
