"""Boxes of full tensors as plans of `torch.distributed.checkpoint`: what a rank writes, and what it reads where.

A box is a part of a global tensor at its offsets, whatever layout it comes from, so that a checkpoint knows no layout.
Chunks that were written tile the global tensor, and chunks that are read are cut out of them. Both planners are the
extension points that torch documents; no collective is issued.
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from shardproof.parallel.communication.layout import Box


def chunk_of(box: Box) -> ChunkStorageMetadata:
    """Where a box lies in its full tensor."""
    return ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.local.shape))


class BoxWriter(DefaultSavePlanner):
    """Plans to write these boxes, by key; those of one key must not overlap."""

    def __init__(self, boxes: Mapping[str, Sequence[Box]]) -> None:
        super().__init__(flatten_state_dict=False)
        self._boxes = {(key, box.offsets): box for key, found in boxes.items() for box in found}

    def create_local_plan(self) -> SavePlan:
        """Plan one item a box."""
        self.plan = SavePlan([_written(key, box) for (key, _), box in self._boxes.items()])
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """This rank's plan alone: that all ranks together tile every tensor is checked once all have written."""
        return create_default_global_save_plan(all_plans)

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """The elements of an item."""
        offset = write_item.index.offset
        assert offset is not None  # every item is a box
        return self._boxes[write_item.index.fqn, tuple(offset)].local.detach().contiguous()


class BoxReader(DefaultLoadPlanner):
    """Plans to read these boxes in place, each with the key whose full tensor it is a part of."""

    def __init__(self, boxes: Sequence[tuple[str, Box]]) -> None:
        super().__init__(flatten_state_dict=False)
        self._boxes = boxes

    def create_local_plan(self) -> LoadPlan:
        """Every stored chunk that a box meets, once for each box. Raises KeyError for a key that is not stored."""
        assert self.metadata is not None
        items: list[ReadItem] = []
        for number, (key, box) in enumerate(self._boxes):
            stored = self.metadata.state_dict_metadata[key]
            assert isinstance(stored, TensorStorageMetadata)
            found = create_read_items_for_chunk_list(key, stored, [chunk_of(box)])
            items += [replace(one, dest_index=MetadataIndex(key, box.offsets, number)) for one in found]
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """The box of an item of the plan."""
        assert index.index is not None
        return self._boxes[index.index][1].local.detach()

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Nothing: no plan of this has bytes."""


def _written(key: str, box: Box) -> WriteItem:
    properties: Any = TensorProperties(dtype=box.local.dtype)
    return WriteItem(
        index=MetadataIndex(key, box.offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(chunk=chunk_of(box), properties=properties, size=torch.Size(box.global_shape)),
    )
