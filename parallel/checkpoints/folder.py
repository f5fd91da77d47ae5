"""The folder of a checkpoint in torch's format: every rank writes its file, and rank 0 joins what they wrote.

Reading checks the metadata, the chunks of every tensor and the sizes of files before it returns any tensor.

A box is a part of a global tensor with its offsets there. A checkpoint holds boxes, and nothing of their layouts. The
chunks that were written tile the global tensor, and boxes that are read are cut out of them. Both planners subclass
those that torch documents for this. No collective is issued.
"""

import io
import itertools
import math
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from shardproof.parallel.checkpoints.state import CheckpointError, dtype_word
from shardproof.parallel.communication.layout import Box, whole_box
from shardproof.reference.checkpoints.torch_format import METADATA, read_metadata


def chunk_of(box: Box) -> ChunkStorageMetadata:
    """The place of a box in its full tensor, as torch's metadata states it."""
    return ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.local.shape))


class BoxWriter(DefaultSavePlanner):
    """A planner that writes these boxes, by key; boxes of one key must not overlap."""

    def __init__(self, boxes: Mapping[str, Sequence[Box]]) -> None:
        super().__init__(flatten_state_dict=False)
        self._boxes = {(key, box.offsets): box for key, found in boxes.items() for box in found}

    def create_local_plan(self) -> SavePlan:
        """Plan one item a box."""
        self.plan = SavePlan([_write_item(key, box) for (key, _), box in self._boxes.items()])
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """The plan of this rank alone. `commit` checks that all ranks together tile every tensor."""
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
        """An item for each box and each stored chunk that overlaps it. Raises KeyError for a key that is not stored."""
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
        """Do nothing: these plans hold tensors alone."""


def _write_item(key: str, box: Box) -> WriteItem:
    properties: Any = TensorProperties(dtype=box.local.dtype)
    return WriteItem(
        index=MetadataIndex(key, box.offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(chunk=chunk_of(box), properties=properties, size=torch.Size(box.global_shape)),
    )


def write_part(folder: Path, rank: int, boxes: Mapping[str, Sequence[Box]]) -> None:
    """Write the file of a rank. Removes the metadata of a former checkpoint first, whose files are overwritten."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / METADATA).unlink(missing_ok=True)
    writer, planner = FileSystemWriter(folder), BoxWriter(boxes)
    planner.set_up_planner({}, None, True)
    writer.set_up_storage_writer(True)
    (plan,), metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    # The writer names files by the place of their plan, and every rank writes alone.
    plan = writer.prepare_global_plan([*[SavePlan([])] * rank, plan])[rank]
    written = writer.write_data(planner.finish_plan(plan), planner).wait()
    metadata = replace(metadata, storage_data={result.index: result.storage_data for result in written})
    (folder / _part(rank)).write_bytes(pickle.dumps(metadata))


def commit(folder: Path, ranks: int) -> None:
    """Make the files of all ranks the checkpoint of this folder, and remove those of a former one.

    Raises CheckpointError when they do not tile every tensor; then the folder holds no checkpoint.
    """
    joined = _join_metadata({rank: read_metadata(folder, _part(rank)) for rank in range(ranks)})
    places: dict[Any, Any] = joined.storage_data
    results = [WriteResult(index=index, size_in_bytes=info.length, storage_data=info) for index, info in places.items()]
    FileSystemWriter(folder).finish(joined, [results])
    used = {str(info.relative_path) for info in places.values()}
    for file in folder.glob("__*"):
        if file.name not in used:
            file.unlink()


class Stored:
    """A checkpoint that was found whole: its metadata, and its tensors on demand."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        self.folder, self.metadata = folder, metadata
        self.tensors = _tensors(metadata)

    @classmethod
    def open(cls, folder: Path) -> "Stored":
        """The checkpoint in this folder, ours or one that torch wrote.

        Raises CheckpointError when there is none, when it holds anything but tensors, or when chunks or files
        are broken.
        """
        if not (folder / METADATA).is_file():
            what = "is no folder" if not folder.is_dir() else f"holds no checkpoint: it has no file {METADATA}"
            raise CheckpointError(folder, what, "a folder that save= or torch.distributed.checkpoint wrote")
        try:
            metadata = read_metadata(folder)
            sizes: dict[str, int] = {}  # file -> the bytes that chunks of it take, at least
            for info in (metadata.storage_data or {}).values():
                sizes[info.relative_path] = max(sizes.get(info.relative_path, 0), info.offset + info.length)
        except Exception as problem:  # torn pickles raise anything
            what = f"{METADATA} cannot be read ({type(problem).__name__}: {problem})"
            raise CheckpointError(folder, what, "the file as it was written") from problem
        found = cls(folder, metadata)
        if others := [key for key in metadata.state_dict_metadata if key not in found.tensors]:
            raise CheckpointError(folder, f"{others[0]} is no tensor", "a checkpoint of tensors alone")
        for key, stored in found.tensors.items():
            _check_tiled(folder, key, stored)
        for name, size in sizes.items():
            file = folder / name
            if not file.is_file():
                raise _make_error(folder, f"the file {name} is missing")
            if file.stat().st_size < size:
                torn = f"the file {name} is torn: it has {file.stat().st_size} bytes of at least {size}"
                raise _make_error(folder, torn)
        return found

    def read(self, boxes: Sequence[tuple[str, Box]]) -> None:
        """Fill each box from the tensor of its key, which must be stored with its shape.

        Raises CheckpointError for a file that torch cannot read.
        """
        reader, planner = FileSystemReader(self.folder), BoxReader(boxes)
        planner.set_up_planner({}, self.metadata, True)
        reader.set_up_storage_reader(self.metadata, True)
        (plan,) = reader.prepare_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
        try:
            reader.read_data(planner.finish_plan(plan), planner).wait()
        except Exception as problem:  # torn pickles raise anything
            raise _make_error(self.folder, f"cannot be read ({type(problem).__name__}: {problem})") from problem

    def full(self, key: str) -> Tensor:
        """The full tensor of a key. Raises CheckpointError as `read` does."""
        entry = self.tensors[key]
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")
        self.read([(key, whole_box(tensor))])
        return tensor

    def chunks(self, key: str) -> list[tuple[tuple[tuple[int, ...], tuple[int, ...]], str]]:
        """((offsets, sizes), file) of every chunk of a tensor, in the order of their offsets."""
        files = {index.offset: str(info.relative_path) for index, info in self._places if index.fqn == key}
        boxes = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in self.tensors[key].chunks]
        return sorted((chunk, files.get(torch.Size(chunk[0]), "")) for chunk in boxes)

    @property
    def _places(self) -> Iterable[tuple[Any, Any]]:
        return self.metadata.storage_data.items() if self.metadata.storage_data else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Parameters of another system's checkpoint, read whole: full tensors by key."""

    folder: Path
    held: Mapping[str, Tensor]

    @property
    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """Shapes and dtypes."""
        return {
            key: TensorStorageMetadata(properties=TensorProperties(dtype=tensor.dtype), size=tensor.shape, chunks=[])
            for key, tensor in self.held.items()
        }

    def full(self, key: str) -> Tensor:
        """The full tensor of a key."""
        return self.held[key]

    def read(self, boxes: Sequence[tuple[str, Box]]) -> None:
        """Fill each box from the tensor of its key."""
        for key, box in boxes:
            at = tuple(slice(a, a + size) for a, size in zip(box.offsets, box.local.shape, strict=True))
            box.local.copy_(self.held[key][at])

    def chunks(self, key: str) -> list[tuple[tuple[tuple[int, ...], tuple[int, ...]], str]]:
        """((offsets, sizes), what wrote it): the whole tensor, by another system."""
        shape = tuple(self.held[key].shape)
        return [(((0,) * len(shape), shape), "another system")]


def _make_error(folder: Path, what: str) -> CheckpointError:
    return CheckpointError(folder, what, "every file as it was written")


def _tensors(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    """The tensors among what a checkpoint holds."""
    entries = metadata.state_dict_metadata
    return {key: stored for key, stored in entries.items() if isinstance(stored, TensorStorageMetadata)}


def _part(rank: int) -> str:
    """The file with the metadata of what a rank has written."""
    return f"__{rank}{METADATA}"


def _join_metadata(parts: Mapping[int, Metadata]) -> Metadata:
    """The metadata of all ranks as one. A chunk that several ranks hold is read from the first of them."""
    tensors: dict[str, TensorStorageMetadata] = {}
    places: dict[Any, Any] = {}
    for rank, part in parts.items():
        for key, stored in _tensors(part).items():
            whole = tensors.setdefault(key, replace(stored, chunks=[]))
            if (whole.size, whole.properties.dtype) != (stored.size, stored.properties.dtype):
                what = f"{key} is {_form(stored)}, and {_form(whole)} on other ranks"
                raise CheckpointError(f"of rank {rank}", what, "one form on all ranks")
            for chunk in stored.chunks:
                if chunk in whole.chunks:  # a copy, such as that of a tied table on the last stage
                    continue
                index = MetadataIndex(key, chunk.offsets, len(whole.chunks))
                places[index] = part.storage_data[index]
                whole.chunks.append(chunk)
    for key, whole in tensors.items():
        _check_tiled("of these ranks", key, whole)
    return replace(parts[0], state_dict_metadata=dict(tensors), storage_data=places)


def _form(stored: TensorStorageMetadata) -> str:
    return f"{tuple(stored.size)} {dtype_word(stored.properties.dtype)}"


def _check_tiled(where: object, key: str, stored: TensorStorageMetadata) -> None:
    """Raise CheckpointError unless every element of the tensor lies in one chunk."""
    for one, other in itertools.combinations([chunk for chunk in stored.chunks if math.prod(chunk.sizes)], 2):
        if all(a < d and c < b for (a, b), (c, d) in zip(_region(one), _region(other), strict=True)):
            raise CheckpointError(where, f"chunks of {key} overlap: {_region(one)} and {_region(other)}", "a tiling")
    elements = sum(math.prod(chunk.sizes) for chunk in stored.chunks)
    if elements != math.prod(stored.size):
        what = f"chunks of {key} hold {elements} of its {math.prod(stored.size)} elements"
        raise CheckpointError(where, what, "chunks that tile the tensor")


def _region(chunk: ChunkStorageMetadata) -> list[tuple[int, int]]:
    return [(first, first + size) for first, size in zip(chunk.offsets, chunk.sizes, strict=True)]
