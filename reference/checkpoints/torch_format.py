"""A folder of torch's format (torch.distributed.checkpoint): its metadata, and its tensors in full.

`read_tensors` has torch read each tensor with `weights_only=True`. Elements that no chunk of the folder holds are NaN
in floating-point tensors. `.metadata` is parsed by us as data: nothing in it is called.

The file is a pickle, so reading it as torch does would run what it holds. Here its names, objects and their fields are
parsed, and any that does not belong to a checkpoint is refused. Then the metadata is built anew from the checked
fields. Every file that it names lies in its folder. Format: torch 2.0 to 2.15, `FileSystemWriter.finish`.
"""

import importlib
import io
import math
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from shardproof.reference.errors import CaseError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata


METADATA = ".metadata"
MOST_BYTES = 2**30
"""A larger file is refused, since its objects would take tens of gigabytes."""
_KINDS = "torch.distributed.checkpoint.metadata"
_OLD = "torch.distributed._shard.sharded_tensor.metadata "  # until torch 2.2; with the blank it is a word of the format
_INFO = "torch.distributed.checkpoint.filesystem _StorageInfo"  # the format's word for where a chunk lies
_PLANS = ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")  # Megatron-Core keeps them
_PROPERTIES = (f"{_KINDS} TensorProperties", f"{_OLD}TensorProperties")
_PATHS = tuple(f"{module} {name}" for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath"))
_NAMES = {
    *(f"{_KINDS} {name}" for name in ("Metadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")),
    *(f"{_KINDS} {name}" for name in ("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata")),
    *(f"torch.distributed.checkpoint.planner {name}" for name in _PLANS),
    "torch.distributed.checkpoint.filesystem _StoragePrefix",
    *(*_PROPERTIES, f"{_OLD}MEM_FORMAT_ENCODING", _INFO, "torch Size", "torch.serialization _get_layout", *_PATHS),
}
_OPCODES = (
    *("PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1"),
    *("BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "EMPTY_TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
    *("TUPLE", "EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS", "MEMOIZE", "BINPUT"),
    *("LONG_BINPUT", "BINGET", "LONG_BINGET", "GLOBAL", "STACK_GLOBAL", "NEWOBJ", "REDUCE", "BUILD"),
)
"""Opcodes of such a file; it has no sets, bytes, persistent ids or registered extensions."""


@dataclass(slots=True, eq=False)
class _Object:
    """An object of the file as data: a name, its arguments, its fields. No two of them are equal."""

    name: str
    made_of: Any = ()
    fields: dict[str, Any] = field(default_factory=dict)


class _Parser(pickle._Unpickler):  # in Python: the unpickler in C takes memory for any index that a file states
    """Parses a pickle: an `_Object` stands for each name, and for each object that the pickle would make of it."""

    stack: list[Any]

    def find_class(self, module: str, name: str) -> Any:
        """The dtype of this name, or an object that has only the name. Raises for any other name."""
        if module == "torch" and isinstance(found := vars(torch).get(name), torch.dtype):
            return found
        if f"{module} {name}" not in _NAMES:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of a checkpoint's metadata")
        return _Object(f"{module} {name}")

    def _make(self) -> None:
        """Handle opcodes that would call something: put its name and arguments on the stack, and call nothing."""
        made_of, called = self.stack.pop(), self.stack.pop()
        self.stack.append(_Object(_object(called).name, made_of))

    def _fill(self) -> None:
        """Handle the opcode that fills an object: keep its fields by name (TensorProperties has a tuple of five)."""
        state = self.stack.pop()
        _object(self.stack[-1]).fields = state if isinstance(state, dict) else {"state": state}

    def _put(self) -> None:
        self._into(self.pop_mark())  # type: ignore[attr-defined]

    def _put_one(self) -> None:
        items = self.stack[-2:]
        del self.stack[-2:]
        self._into(items)

    def _into(self, items: list[Any]) -> None:
        """Fill a dict. Keys must be texts, numbers or objects, since hashing nested tuples may never end."""
        if not isinstance(self.stack[-1], dict) or any(not isinstance(key, str | int | _Object) for key in items[::2]):
            raise pickle.UnpicklingError("it fills other than a dict whose keys are texts, numbers or places")
        self.stack[-1].update(zip(items[::2], items[1::2], strict=True))

    dispatch: ClassVar[dict[int, Any]] = {
        **{code[0]: pickle._Unpickler.dispatch[code[0]] for code in map(vars(pickle).__getitem__, _OPCODES)},
        **dict.fromkeys((pickle.NEWOBJ[0], pickle.REDUCE[0]), _make),
        **{pickle.BUILD[0]: _fill, pickle.SETITEMS[0]: _put, pickle.SETITEM[0]: _put_one},
    }


def read_metadata(folder: Path, name: str = METADATA) -> "Metadata":
    """The metadata in the file of this name of a checkpoint, without what its planner left in it.

    Raises OSError if the file cannot be read, and pickle.UnpicklingError if it is not the metadata of a checkpoint.
    """
    file = folder / name
    if not file.is_file() or file.stat().st_size > MOST_BYTES:
        raise pickle.UnpicklingError(f"it must be a file of at most {MOST_BYTES} bytes")
    try:
        parsed = _Parser(io.BytesIO(file.read_bytes())).load()
    except pickle.UnpicklingError:
        raise
    except Exception as problem:  # torn files raise anything, and a foreign opcode KeyError
        raise pickle.UnpicklingError(f"it is torn, or no checkpoint's ({type(problem).__name__})") from problem
    return _metadata(parsed, folder)


def _metadata(parsed: Any, folder: Path) -> "Metadata":
    kinds = importlib.import_module(_KINDS)  # takes a second
    fields = _fields(parsed, f"{_KINDS} Metadata")
    entries = _need(fields.get("state_dict_metadata"), dict, "state_dict_metadata")
    places = _need(fields.get("storage_data"), dict, "storage_data")
    found: Metadata = kinds.Metadata(
        state_dict_metadata={_need(key, str, "a key"): _entry(key, entry, kinds) for key, entry in entries.items()},
        storage_data=_places(places, kinds),
        version=fields.get("version") if isinstance(fields.get("version"), str) else None,
    )
    top = folder.resolve()
    for name in sorted({info.relative_path for info in found.storage_data.values()}):
        path, file = PurePosixPath(name), (folder / name).resolve()
        if path.is_absolute() or ".." in path.parts or not file.is_relative_to(top):
            raise pickle.UnpicklingError(f"the file {name} lies outside of the checkpoint's folder")
        if file.exists() and not file.is_file():
            raise pickle.UnpicklingError(f"{name} is no file")
    return found


def _entry(key: str, parsed: Any, kinds: Any) -> Any:
    """The metadata of a tensor, or of another saved value."""
    if _need(parsed, _Object, key).name == f"{_KINDS} BytesStorageMetadata":
        return kinds.BytesStorageMetadata()
    fields = _fields(parsed, f"{_KINDS} TensorStorageMetadata")
    state = _fields(fields.get("properties"), *_PROPERTIES).get("state")
    dtype = _need(state[0] if isinstance(state, tuple) and state else None, torch.dtype, f"the dtype of {key}")
    size, chunks = _size(fields.get("size"), key), []
    for part in _need(fields.get("chunks"), list, f"the chunks of {key}"):
        own = _fields(part, f"{_KINDS} ChunkStorageMetadata")
        chunk = kinds.ChunkStorageMetadata(offsets=_size(own.get("offsets"), key), sizes=_size(own.get("sizes"), key))
        places = zip(chunk.offsets, chunk.sizes, size, strict=False)
        if not len(chunk.offsets) == len(chunk.sizes) == len(size) or any(at + n > end for at, n, end in places):
            raise pickle.UnpicklingError(f"a chunk of {key} lies outside of its shape {tuple(size)}")
        chunks.append(chunk)
    return kinds.TensorStorageMetadata(properties=kinds.TensorProperties(dtype=dtype), size=size, chunks=chunks)


def _places(parsed: Mapping[Any, Any], kinds: Any) -> dict[Any, Any]:
    """The places of chunks: index in the tensor -> its file, and its bytes there."""
    module, _, name = _INFO.partition(" ")
    info_class, found = getattr(importlib.import_module(module), name), {}
    for key, value in parsed.items():
        index, info = _fields(key, f"{_KINDS} MetadataIndex"), _fields(value, _INFO)
        fqn = _need(index.get("fqn"), str, "the key of a chunk")
        offset = None if index.get("offset") is None else _size(index["offset"], fqn)
        hint = None if index.get("index") is None else _count(index["index"], fqn)
        transforms = _need(info.get("transform_descriptors") or [], list, f"the transforms of {fqn}")
        found[kinds.MetadataIndex(fqn, offset, hint)] = info_class(
            relative_path=_need(info.get("relative_path"), str, f"the file of {fqn}"),
            offset=_count(info.get("offset"), fqn),
            length=_count(info.get("length"), fqn),
            transform_descriptors=[_need(one, str, f"a transform of {fqn}") for one in transforms] or None,
        )
    return found


def _fields(value: Any, *names: str) -> dict[str, Any]:
    """The fields of an object, which must have one of these names."""
    if not isinstance(value, _Object) or value.name not in names:
        raise pickle.UnpicklingError(f"it has a {_kind(value)} where a {names[0].split()[1]} must be")
    return value.fields


def _size(value: Any, key: str) -> torch.Size:
    numbers = value.made_of if isinstance(value, _Object) and value.name == "torch Size" else None
    if not isinstance(numbers, tuple) or len(numbers) != 1 or not isinstance(numbers[0], tuple):
        raise pickle.UnpicklingError(f"a size of {key} is a {_kind(value)}")
    return torch.Size([_count(number, key) for number in numbers[0]])


def _count(value: Any, key: str) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise pickle.UnpicklingError(f"a number of {key} is a {_kind(value)} that is no count")
    return value


def _need(value: Any, kind: type, what: str) -> Any:
    if not isinstance(value, kind):
        raise pickle.UnpicklingError(
            f"{what}: a {_kind(value)} stands where a {kind.__name__.strip('_').lower()} must be"
        )
    return value


def _kind(value: Any) -> str:
    return value.name.split()[-1] if isinstance(value, _Object) else type(value).__name__


def _object(value: Any) -> _Object:
    if not isinstance(value, _Object):
        raise pickle.UnpicklingError(f"it uses a {type(value).__name__} as an object")
    return value


def read_tensors(folder: str, word: str = "load") -> Mapping[str, Tensor]:
    """The tensors of a checkpoint by key, to be read only; those of random streams (`rng.`) are left out.

    Raises CaseError for this word if torch cannot read the folder.
    """
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
    from torch.distributed import checkpoint  # noqa: PLC0415  (DTensor)

    reader, planner = checkpoint.FileSystemReader(folder), checkpoint.DefaultLoadPlanner(flatten_state_dict=False)
    metadata = read_metadata(Path(folder))
    tensors = {
        key: _fill_with_nan(torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu"))
        for key, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, checkpoint.TensorStorageMetadata) and not key.startswith("rng.")
    }
    planner.set_up_planner(tensors, metadata, True)
    reader.set_up_storage_reader(metadata, True)
    (plan,) = reader.prepare_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
    reader.read_data(planner.finish_plan(plan), planner).wait()
    return tensors


def _fill_with_nan(tensor: Tensor) -> Tensor:
    return tensor.fill_(math.nan) if tensor.is_floating_point() else tensor
