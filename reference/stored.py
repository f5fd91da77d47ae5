"""The checkpoint that a case begins with (`load=`), as torch's own loader reads it: full tensors, no layout.

    model.<name>                                      a parameter
    optimizer.state.<name>.exp_avg, exp_avg_sq, step  adamw's states of it
    train.steps, train.loss_scale                     steps that were run before, state of the loss scale

The ranks under test read the same files by a reader of their own, so that neither vouches for the other. A folder of
another system (`reference.exchange`) has parameters alone, and ranks cut theirs out of these.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from reference.case import Case
from reference.errors import CaseError
from reference.exchange.fused import joined, parted
from reference.exchange.hugging_face import is_hugging_face, read
from reference.exchange.megatron import is_megatron, named

__all__ = ["steps_before", "stored", "tensors"]

_METADATA = ".metadata"


def stored(case: Case) -> Mapping[str, Tensor]:
    """Every tensor of the checkpoint that the case loads, by key, to be read only. Raises CaseError as `tensors`."""
    folder = Path(case.load)
    if not is_hugging_face(folder) and not is_megatron(folder):
        return tensors(case.load)
    written_ns = max(file.stat().st_mtime_ns for file in folder.iterdir())
    return _foreign(folder, case.fuse_qkv, case.fuse_mlp, case.kv_heads, case.vocab, written_ns)


def tensors(folder: str, word: str = "load") -> Mapping[str, Tensor]:
    """Every tensor of a checkpoint by key, to be read only. Raises CaseError of this word when torch cannot read it."""
    try:
        state = (Path(folder) / _METADATA).stat()
    except OSError as problem:
        rule = f"holds no checkpoint ({problem.strerror or problem})"
        raise CaseError(word, folder, rule, "a folder that save= wrote") from problem
    try:
        return _read(folder, state.st_mtime_ns, state.st_ino)
    except Exception as problem:  # torn files raise anything
        rule = f"is a checkpoint that torch cannot read ({type(problem).__name__}: {str(problem).splitlines()[0]})"
        raise CaseError(word, folder, rule, "a folder as save= wrote it") from problem


def steps_before(case: Case) -> int:
    """The optimizer steps that were run before the first one of the case; 0 for a case that loads nothing."""
    return int(stored(case)["train.steps"]) if case.load else 0


@lru_cache(maxsize=2)
def _foreign(
    folder: Path, fuse_qkv: bool, fuse_mlp: bool, kv_heads: int, vocab: int, _written_ns: int
) -> Mapping[str, Tensor]:
    """Parameters alone: training begins with them."""
    if is_hugging_face(folder):
        held = read(folder, fuse_qkv=fuse_qkv, fuse_mlp=fuse_mlp, kv_heads=kv_heads)
    else:
        parts = parted(named(folder, tensors(str(folder)), vocab=vocab), kv_heads)
        held = joined(parts, kv_heads, qkv=fuse_qkv, mlp=fuse_mlp)
    found = {f"model.{name}": tensor for name, tensor in held.items()}
    return found | {"train.steps": torch.tensor(0)}


@lru_cache(maxsize=2)
def _read(folder: str, _written_ns: int, _inode: int) -> Mapping[str, Tensor]:
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner  # noqa: PLC0415  (takes a second)
    from torch.distributed.checkpoint.filesystem import FileSystemReader  # noqa: PLC0415
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata  # noqa: PLC0415

    reader, planner = FileSystemReader(folder), DefaultLoadPlanner(flatten_state_dict=False)
    metadata = reader.read_metadata()
    tensors = {
        key: torch.empty(held.size, dtype=held.properties.dtype, device="cpu")
        for key, held in metadata.state_dict_metadata.items()
        if isinstance(held, TensorStorageMetadata) and not key.startswith("rng.")
    }
    planner.set_up_planner(tensors, metadata, True)
    reader.set_up_storage_reader(metadata, True)
    (plan,) = reader.prepare_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
    reader.read_data(planner.finish_plan(plan), planner).wait()
    return tensors
