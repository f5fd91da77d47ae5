"""The device of each rank on this machine."""

from __future__ import annotations

import os

import torch

from harness.errors import RequestError


def rank_device(name: str, rank: int) -> torch.device:
    """This rank's device: a GPU of its own on cuda. Raises RequestError when this machine has too few."""
    if name != "cuda":
        return torch.device(name)
    count, local = torch.cuda.device_count(), int(os.environ.get("LOCAL_RANK", rank))
    if local >= count:
        rule = f"every rank needs a GPU of its own, rank {local} finds {count} on this machine"
        raise RequestError(f"device=cuda: {rule}; legal: --device cpu, or at most {count} ranks")
    torch.cuda.set_device(local)
    return torch.device("cuda", local)
