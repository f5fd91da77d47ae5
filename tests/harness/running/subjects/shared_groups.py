"""A library's state, kept once a process as Megatron-Core and DeepSpeed keep their groups."""

import torch.distributed as dist

_RANK = -1


def enter() -> None:
    """Note this process's rank."""
    global _RANK  # noqa: PLW0603  (what this library does)
    _RANK = dist.get_rank()


def place() -> int:
    return _RANK
