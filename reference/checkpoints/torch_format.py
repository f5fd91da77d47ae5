"""Folders of torch's format that hold bytes beside tensors, as Megatron-Core's do: bytes are taken as they are.

Importing this takes a second.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem, WriteItem

__all__ = ["bytes_in", "write"]


class _BytesReader(DefaultLoadPlanner):
    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)
        self.found: dict[str, io.BytesIO] = {}

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.found[read_item.dest_index.fqn] = io.BytesIO(value.getvalue())


class _BytesWriter(DefaultSavePlanner):
    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002, ARG002  (torch's name)
        """As it is: torch would pickle it once more."""
        return object


def bytes_in(folder: Path) -> dict[str, io.BytesIO]:
    """What a folder holds that is no tensor, by key. Raises whatever torch does for files that it cannot read."""
    reader, planner = FileSystemReader(folder), _BytesReader()
    metadata = reader.read_metadata()
    keys = [key for key, held in metadata.state_dict_metadata.items() if isinstance(held, BytesStorageMetadata)]
    planner.set_up_planner(dict.fromkeys(keys), metadata, True)
    reader.set_up_storage_reader(metadata, True)
    (plan,) = reader.prepare_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
    reader.read_data(planner.finish_plan(plan), planner).wait()
    return planner.found


def write(folder: Path, state: Mapping[str, Tensor | io.BytesIO]) -> None:
    """Write tensors and bytes by key into a folder, as one rank would. Raises OSError where that is not possible."""
    writer, planner = FileSystemWriter(folder), _BytesWriter(flatten_state_dict=False)
    planner.set_up_planner(dict(state), None, True)
    writer.set_up_storage_writer(True)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    (plan,) = writer.prepare_global_plan(plans)
    written = writer.write_data(planner.finish_plan(plan), planner).wait()
    writer.finish(metadata, [written])
