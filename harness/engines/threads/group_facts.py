"""Facts that torch reads of a process group beside its calls: ranks, names, devices, the store, and how it ends."""

from typing import Any, Self

import torch
import torch.distributed as dist

from shardproof.harness.engines.calls.pending import RankGroup
from shardproof.harness.torch_internals.groups import answers_torch

_TorchGroup: Any = dist.ProcessGroup
"""Untyped on purpose: torch's stubs declare overloads that no Python subclass can match."""


@answers_torch
class GroupFacts(_TorchGroup):
    """Rank `member` of a group, under torch's names for its facts; `splits` counts its calls of split_group."""

    def __init__(self, group: RankGroup, member: int, name: str) -> None:
        super().__init__(member, len(group.ranks))
        self._group, self._member, self._name = group, member, name
        self.splits = 0

    def rank(self) -> int:
        """This rank's place in the group."""
        return self._member

    def size(self) -> int:
        """Ranks in the group."""
        return len(self._group.ranks)

    @property
    def group_name(self) -> str:
        """The name under which operators find the group."""
        return self._name

    @property
    def group_desc(self) -> str:
        """The user's name of the group."""
        return self._group.description

    def getGroupName(self) -> str:
        """`group_name`, for C++."""
        return self._name

    def getGroupDesc(self) -> str:
        """`group_desc`, for C++."""
        return self._group.description

    def getBackendName(self) -> str:
        """Not a name of C++, which would look for that backend's object. dist.get_backend returns gloo."""
        return "inproc"

    def get_backend(self, device: torch.device) -> Self:
        """The group itself, which has no backend of torch and coalesces no messages."""
        return self

    @property
    def device_types(self) -> list[torch.device]:
        """The devices whose tensors the group takes."""
        return [torch.device("cpu"), torch.device("cuda")]

    def has_hooks(self) -> bool:
        """False: torch's hooks are of its backends."""
        return False

    def get_group_store(self) -> Any:
        """The group's key-value store, in this process."""
        return self._group.store

    def shutdown(self) -> None:
        """Nothing to release: the group ends with the run."""

    def abort(self) -> None:
        """The same as `shutdown`."""
