"""The checkpoint that a case begins with (`load=`), as torch's own loader reads it: full tensors, no layout.

    model.<name>                                      a parameter
    optimizer.state.<name>.exp_avg, exp_avg_sq, step  adamw's states of it
    train.steps, train.loss_scale                     steps that were run before, state of the loss scale

The ranks under test read the same files by a reader of their own, so that neither vouches for the other. A folder of
another system (`foreign`) has parameters alone, and ranks cut theirs out of these.
"""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from shardproof.reference.case import Case
from shardproof.reference.checkpoints.foreign import Form, is_foreign, parameters
from shardproof.reference.checkpoints.torch_format import read_tensors


def stored_tensors(case: Case) -> Mapping[str, Tensor]:
    """Every tensor of the checkpoint that the case loads, by key, not to be written to.

    Raises CaseError as `read_tensors`.
    """
    folder = Path(case.load)
    if not is_foreign(folder):
        return read_tensors(case.load)
    written_ns = max(file.stat().st_mtime_ns for file in folder.iterdir())
    form = Form(fuse_qkv=case.fuse_qkv, fuse_mlp=case.fuse_mlp, kv_heads=case.kv_heads, vocab=case.vocab)
    return _foreign(folder, form, written_ns)


def steps_before(case: Case) -> int:
    """The optimizer steps that were run before the first one of the case; 0 for a case that loads nothing."""
    return int(stored_tensors(case)["train.steps"]) if case.load else 0


@lru_cache(maxsize=2)
def _foreign(folder: Path, form: Form, _written_ns: int) -> Mapping[str, Tensor]:
    """Parameters alone: training begins with them."""
    found = {f"model.{name}": tensor for name, tensor in parameters(folder, form).items()}
    return found | {"train.steps": torch.tensor(0)}
