"""A library's groups, kept once a process as Megatron-Core and DeepSpeed keep them."""

from typing import Any

import torch.distributed as dist

_GROUP: Any = None
_PLACE: dict[str, int] = {}


def initialize() -> None:
    """Make the group of all ranks. Raises AssertionError for a second call."""
    global _GROUP  # noqa: PLW0603  (what this library does)
    assert _GROUP is None, "the group is already initialized"
    _GROUP = dist.new_group(list(range(dist.get_world_size())))


def destroy() -> None:
    global _GROUP  # noqa: PLW0603
    _GROUP = None


def enter() -> None:
    """Note this process's rank."""
    _PLACE["rank"] = dist.get_rank()


def place() -> int:
    return _PLACE["rank"]
