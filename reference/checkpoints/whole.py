"""A folder of torch's format (torch.distributed.checkpoint) as full tensors, read by torch's own loader.

The metadata alone is read by us, as data. torch reads each tensor with `weights_only=True`; the rest is left alone.

Elements that no chunk of the folder holds are NaN where they are numbers.
"""

import math
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from shardproof.reference.checkpoints.metadata import METADATA, read_metadata
from shardproof.reference.errors import CaseError


def tensors(folder: str, word: str = "load") -> Mapping[str, Tensor]:
    """Every tensor of a checkpoint by key, to be read only. Raises CaseError of this word when torch cannot read it."""
    try:
        state = (Path(folder) / METADATA).stat()
    except OSError as problem:
        rule = f"holds no checkpoint ({problem.strerror or problem})"
        raise CaseError(word, folder, rule, "a folder that save= wrote") from problem
    try:
        return _read(folder, state.st_mtime_ns, state.st_ino)
    except Exception as problem:  # torn files raise anything
        why = f"{type(problem).__name__}: {problem}".partition("\n")[0]
        rule = f"is a checkpoint that torch cannot read ({why})"
        raise CaseError(word, folder, rule, "a folder as save= wrote it") from problem


@lru_cache(maxsize=2)
def _read(folder: str, _written_ns: int, _inode: int) -> Mapping[str, Tensor]:
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner  # noqa: PLC0415  (takes a second)
    from torch.distributed.checkpoint.filesystem import FileSystemReader  # noqa: PLC0415
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata  # noqa: PLC0415

    reader, planner = FileSystemReader(folder), DefaultLoadPlanner(flatten_state_dict=False)
    metadata = read_metadata(Path(folder))
    tensors = {
        key: _poisoned(torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu"))
        for key, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and not key.startswith("rng.")
    }
    planner.set_up_planner(tensors, metadata, True)
    reader.set_up_storage_reader(metadata, True)
    (plan,) = reader.prepare_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
    reader.read_data(planner.finish_plan(plan), planner).wait()
    return tensors


def _poisoned(tensor: Tensor) -> Tensor:
    return tensor.fill_(math.nan) if tensor.is_floating_point() else tensor
