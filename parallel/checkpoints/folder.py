"""The folder of a checkpoint: every rank writes its part beside the former one, and one rename makes all of it valid.

`.metadata` names the files that belong to the checkpoint. A save replaces it last, in one step of the file system, when
every file is on the disk. Until then it names the files of the former checkpoint, which are removed afterwards. So a
save that is killed at any moment leaves the former checkpoint whole, or the new one.

Reading checks everything before it hands out a number: the metadata, the chunks of every tensor, the bytes of every
file. The SHA-256 of every file that is read is checked too.
"""

import hashlib
import itertools
import json
import math
import os
import pickle
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from shardproof.parallel.checkpoints.planners import BoxReader, BoxWriter
from shardproof.parallel.checkpoints.state import CheckpointError, dtype_word
from shardproof.parallel.communication.layout import Box, whole
from shardproof.reference.checkpoints.metadata import METADATA, read_metadata

_SUMS = "sums.json"
_DATA, _RANK = "data-", "rank-"


def next_data(folder: Path) -> str:
    """The name of the folder for the files of the coming save: data-N, N one above that of the former checkpoint.

    Every rank gets the same name, as long as none commits before all of them have written.
    """
    try:
        former = _used(Stored.open(folder).metadata)
    except CheckpointError:
        former = set()
    numbers = [int(name.removeprefix(_DATA)) for name in former if name.removeprefix(_DATA).isdigit()]
    return f"{_DATA}{1 + max(numbers, default=0)}"


def write_part(folder: Path, data: str, rank: int, boxes: Mapping[str, Sequence[Box]]) -> None:
    """Write what a rank holds, whole and on the disk when this returns; what an earlier save left there is removed."""
    part = folder / data / f"{_RANK}{rank}"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    writer, planner = FileSystemWriter(part), BoxWriter(boxes)
    planner.set_up_planner({}, None, True)
    writer.set_up_storage_writer(True)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    (plan,) = writer.prepare_global_plan(plans)
    written = writer.write_data(planner.finish_plan(plan), planner).wait()
    writer.finish(metadata, [written])
    _on_disk(part)


def commit(folder: Path, data: str, ranks: int) -> None:
    """Make the parts of all ranks the checkpoint of this folder, then remove what no longer belongs to it.

    Raises CheckpointError when the parts do not tile every tensor; then the former checkpoint stays.
    """
    parts = {f"{data}/{_RANK}{rank}": folder / data / f"{_RANK}{rank}" for rank in range(ranks)}
    metadata = _joined({name: read_metadata(part) for name, part in parts.items()})
    files = sorted(file for part in parts.values() for file in part.iterdir())
    sums = {str(file.relative_to(folder / data)): [file.stat().st_size, _sha256(file)] for file in files}
    _write(folder / data / _SUMS, json.dumps(sums).encode())
    for path in (folder / data, folder):
        _on_disk(path)
    _write(folder / f"{METADATA}.new", pickle.dumps(metadata))
    os.replace(folder / f"{METADATA}.new", folder / METADATA)
    _on_disk(folder)
    for path in (*(folder / data).iterdir(), *folder.glob(f"{_DATA}*")):
        if path not in {*parts.values(), folder / data / _SUMS, folder / data}:
            shutil.rmtree(path, ignore_errors=True)


class Stored:
    """A checkpoint that was found whole: its metadata, and its tensors on demand."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        self.folder, self.metadata = folder, metadata
        self.tensors = _tensors(metadata)
        self._verified: set[str] = set()

    @classmethod
    def open(cls, folder: Path) -> "Stored":
        """The checkpoint in this folder, ours or one that torch wrote.

        Raises CheckpointError when there is none, when it holds other than tensors, or when chunks or files are broken.
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
                raise _broken(folder, f"the file {name} is missing")
            if file.stat().st_size < size:
                raise _broken(folder, f"the file {name} is torn: it has {file.stat().st_size} bytes of at least {size}")
        found._check_sums(sizes, content=False)
        return found

    def read(self, boxes: Sequence[tuple[str, Box]]) -> None:
        """Fill each box from the tensor of its key, which must be stored with its shape.

        Raises CheckpointError when a file that is read is not the one that was written.
        """
        keys = {key for key, _ in boxes}
        files = {str(info.relative_path) for index, info in self._places if index.fqn in keys}
        self._check_sums(files - self._verified, content=True)
        self._verified |= files
        reader, planner = FileSystemReader(self.folder), BoxReader(boxes)
        planner.set_up_planner({}, self.metadata, True)
        reader.set_up_storage_reader(self.metadata, True)
        (plan,) = reader.prepare_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
        try:
            reader.read_data(planner.finish_plan(plan), planner).wait()
        except Exception as problem:  # torn pickles raise anything
            raise _broken(self.folder, f"cannot be read ({type(problem).__name__}: {problem})") from problem

    def full(self, key: str) -> Tensor:
        """The full tensor of a key. Raises CheckpointError as `read` does."""
        entry = self.tensors[key]
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")
        self.read([(key, whole(tensor))])
        return tensor

    def chunks(self, key: str) -> list[tuple[tuple[tuple[int, ...], tuple[int, ...]], str]]:
        """((offsets, sizes), file) of every chunk of a tensor, in the order of their offsets."""
        files = {index.offset: str(info.relative_path) for index, info in self._places if index.fqn == key}
        boxes = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in self.tensors[key].chunks]
        return sorted((chunk, files.get(torch.Size(chunk[0]), "")) for chunk in boxes)

    @property
    def _places(self) -> Iterable[tuple[Any, Any]]:
        return self.metadata.storage_data.items() if self.metadata.storage_data else ()

    def _check_sums(self, names: Iterable[str], *, content: bool) -> None:
        """Compare files with what was written of them; a checkpoint that another program wrote says nothing of it."""
        sums: dict[str, tuple[int, str]] = {}
        for data in _used(self.metadata):
            try:
                listed = json.loads((self.folder / data / _SUMS).read_bytes())
                sums |= {f"{data}/{name}": (int(size), str(digest)) for name, (size, digest) in listed.items()}
            except (OSError, ValueError, TypeError, AttributeError, RecursionError) as problem:
                raise _broken(self.folder, f"{data}/{_SUMS} cannot be read ({type(problem).__name__})") from problem
        for name in sorted({*names} & {*sums}):
            size, digest = sums[name]
            file = self.folder / name
            if file.stat().st_size != size:
                raise _broken(self.folder, f"the file {name} is torn: it has {file.stat().st_size} bytes of {size}")
            if content and _sha256(file) != digest:
                what = f"the file {name} is not the one that was written: its SHA-256 is another"
                raise _broken(self.folder, what)


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


def _broken(folder: Path, what: str) -> CheckpointError:
    return CheckpointError(folder, what, "every file as it was written")


def _tensors(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    """The tensors among what a checkpoint holds."""
    entries = metadata.state_dict_metadata
    return {key: stored for key, stored in entries.items() if isinstance(stored, TensorStorageMetadata)}


def _used(metadata: Metadata) -> set[str]:
    """The data folders, of ours, that a checkpoint's files lie in."""
    tops = {str(info.relative_path).split("/")[0] for info in (metadata.storage_data or {}).values()}
    return {top for top in tops if top.startswith(_DATA)}


def _joined(parts: Mapping[str, Metadata]) -> Metadata:
    """The metadata of all parts, by their folders; of chunks that several of them hold the first one's."""
    tensors: dict[str, TensorStorageMetadata] = {}
    places: dict[Any, Any] = {}
    for name, part in parts.items():
        for key, stored in _tensors(part).items():
            whole = tensors.setdefault(key, replace(stored, chunks=[]))
            if (whole.size, whole.properties.dtype) != (stored.size, stored.properties.dtype):
                raise CheckpointError(
                    name, f"{key} is {_form(stored)}, and {_form(whole)} in other parts", "one form on all ranks"
                )
            for chunk in stored.chunks:
                if chunk in whole.chunks:  # a copy, such as that of a tied table on the last stage
                    continue
                index = MetadataIndex(key, chunk.offsets, len(whole.chunks))
                info = part.storage_data[index]
                whole.chunks.append(chunk)
                places[index] = replace(info, relative_path=f"{name}/{info.relative_path}")
    for key, whole in tensors.items():
        _check_tiled(next(iter(parts)), key, whole)
    first = next(iter(parts.values()))
    return replace(first, state_dict_metadata=dict(tensors), storage_data=places, storage_meta=None)


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


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _write(file: Path, content: bytes) -> None:
    """Write a file whole; it is on the disk when this returns."""
    with file.open("wb") as opened:
        opened.write(content)
        opened.flush()
        os.fsync(opened.fileno())


def _on_disk(folder: Path) -> None:
    """The names in a folder are on the disk when this returns."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
