"""`.metadata` of a foreign checkpoint is data: nothing in it is called, and what torch writes is read as it is."""

import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from struct import pack
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StoragePrefix
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.planner_helpers import _create_write_item_for_tensor
from torch.distributed.checkpoint.state_dict_saver import save

from shardproof.reference.checkpoints.torch_format import METADATA, read_metadata, read_tensors
from shardproof.reports.commands.cli import main

KINDS = "torch.distributed.checkpoint.metadata"
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A folder as torch writes it: tensors of several dtypes and forms, nested, and what is no tensor."""
    nested = {
        "b": torch.zeros(2, dtype=torch.bfloat16),
        "c": torch.ones(1, 2, 3, 4).to(memory_format=torch.channels_last),
    }
    state = {
        "a": torch.ones(3, 4),
        "n": nested,
        "none": torch.empty(0, 3),
        "one": torch.tensor(3),
        "step": 5,
        "list": ["s"],
    }
    save(state, checkpoint_id=tmp_path / "written", no_dist=True)
    return tmp_path / "written"


def test_a_folder_of_torch_is_read_as_torch_reads_it(written: Path) -> None:
    ours, theirs = read_metadata(written), FileSystemReader(written).read_metadata()
    assert theirs.planner_data and theirs.storage_meta
    assert ours == replace(theirs, planner_data=None, storage_meta=None)
    assert pickle.loads(pickle.dumps(ours)) == ours
    assert read_tensors(str(written))["n.c"].sum() == 24


def test_plans_that_megatron_core_keeps_beside_it_are_left_aside(written: Path) -> None:
    """Megatron's metadata has the plans of all ranks in a further field."""
    metadata = FileSystemReader(written).read_metadata()
    item = _create_write_item_for_tensor("a", torch.ones(3, 4))
    vars(metadata)["all_local_plans"] = [SavePlan([item], storage_data=_StoragePrefix("__0_"), planner_data={1: "a"})]
    (written / METADATA).write_bytes(pickle.dumps(metadata))
    assert read_metadata(written) == replace(metadata, planner_data=None, storage_meta=None)


def _name(module: str, name: str) -> bytes:
    """The opcodes of a global that is looked up by two texts."""
    return b"".join(b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name)) + b"\x93"


class _Runs:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("ran",)


def _dict_of(key: bytes) -> bytes:
    return b"\x80\x04}" + key + b"Ns."


_DOUBLED = b")\x94" + b"".join(b"h" + bytes([i]) + b"h" + bytes([i]) + b"\x86\x94" for i in range(60))
HOSTILE = {
    "a call": (pickle.dumps(_Runs()), "it names posix.mkdir"),
    "a call, protocol 0": (pickle.dumps(_Runs(), 0), "it names posix.mkdir"),
    "a dotted name": (b"\x80\x04" + _name("torch", "os.system") + b"X\x01\0\0\0x\x85R.", "it names torch.os.system"),
    "a name that metadata imports": (b"\x80\x04" + _name(KINDS, "dataclass") + b")R.", f"it names {KINDS}.dataclass"),
    "getattr": (b"\x80\x04" + _name("builtins", "getattr") + b")R.", "it names builtins.getattr"),
    "a function of torch": (b"\x80\x04" + _name("torch", "load") + b")R.", "it names torch.load"),
    "a dtype called": (b"\x80\x04" + _name("torch", "half") + b")R.", "it uses a dtype as an object"),
    "an extension": (b"\x80\x04\x82\x01.", "KeyError"),
    "a persistent id": (b"Pfile\n.", "KeyError"),
    "an instance by its name": (b"(S'1'\nibuiltins\neval\n.", "KeyError"),
    "bytes of a terabyte": (b"\x80\x04\x8e" + pack("<Q", 2**40) + b".", "KeyError"),
    "a text of a terabyte": (b"\x80\x04\x8d" + pack("<Q", 2**40) + b".", "EOFError"),
    "a frame of a terabyte": (b"\x80\x04\x95" + pack("<Q", 2**40) + b".", "it is torn"),
    "an index of 32 GB": (b"\x80\x04Nr" + pack("<I", 2**32 - 1) + b".", "it has a NoneType where a Metadata must be"),
    "a key whose hash takes 2^60 steps": (_dict_of(_DOUBLED), "it fills other than a dict"),
    "deep lists": (b"\x80\x04" + b"]" * 20000 + b"a" * 19999 + b".", "it has a list where a Metadata must be"),
    "nothing": (b"", "EOFError"),
}


@pytest.mark.parametrize("how", HOSTILE)
def test_nothing_that_it_names_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    content, words = HOSTILE[how]
    (tmp_path / METADATA).write_bytes(content)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(pickle.UnpicklingError) as refused:
        read_metadata(tmp_path)
    assert words in str(refused.value) and not Path("ran").exists()


def test_classes_of_torch_stay_as_they_are(tmp_path: Path) -> None:
    """A state whose second part is set attribute by attribute would change the class itself."""
    before = dict(vars(MetadataIndex))
    state = b"N}\x8c\x08__hash__" + _name(KINDS, "Metadata") + b"s\x86b."
    (tmp_path / METADATA).write_bytes(b"\x80\x04" + _name(KINDS, "MetadataIndex") + state)
    with pytest.raises(pickle.UnpicklingError):
        read_metadata(tmp_path)
    assert dict(vars(MetadataIndex)) == before


def _places(**fields: object) -> Callable[[Metadata], None]:
    def change(metadata: Metadata) -> None:
        for info in metadata.storage_data.values():
            vars(info).update(fields)

    return change


FIELDS: dict[str, tuple[Callable[[Any], object], str]] = {
    "a file above": (
        _places(relative_path="../outside"),
        "the file ../outside lies outside of the checkpoint's folder",
    ),
    "a file elsewhere": (_places(relative_path="/etc/passwd"), "the file /etc/passwd lies outside"),
    "a link that leads outside": (_places(relative_path="link"), "the file link lies outside"),
    "a pipe": (_places(relative_path="pipe"), "pipe is no file"),
    "a name that is none": (_places(relative_path=5), "a int stands where a str must be"),
    "an offset below 0": (_places(offset=-1), "that is no count"),
    "transforms": (_places(transform_descriptors=7), "a int stands where a list must be"),
    "a size of text": (lambda held: setattr(held.state_dict_metadata["a"], "size", "3x4"), "a size of a is a str"),
    "a size below 0": (lambda held: setattr(held.state_dict_metadata["a"], "size", torch.Size([-3, 4])), "no count"),
    "a chunk outside": (
        lambda held: setattr(held.state_dict_metadata["a"], "size", torch.Size([2, 4])),
        "lies outside",
    ),
    "no chunks": (lambda held: setattr(held.state_dict_metadata["a"], "chunks", None), "where a list must be"),
    "no properties": (lambda held: setattr(held.state_dict_metadata["a"], "properties", 1), "a TensorProperties must"),
    "no tensors": (lambda held: setattr(held, "state_dict_metadata", 1), "state_dict_metadata: a int stands"),
    "no places": (lambda held: setattr(held, "storage_data", None), "storage_data: a NoneType stands"),
}


@pytest.mark.parametrize("how", FIELDS)
def test_fields_of_another_type_are_one_sentence(written: Path, how: str) -> None:
    change, words = FIELDS[how]
    metadata = pickle.loads((written / METADATA).read_bytes())
    change(metadata)
    (written / METADATA).write_bytes(pickle.dumps(metadata))
    (written.parent / "outside").touch()
    (written / "link").symlink_to("../outside")
    os.mkfifo(written / "pipe")
    with pytest.raises(pickle.UnpicklingError) as refused:
        read_metadata(written)
    assert words in str(refused.value)


def test_commands_run_nothing_that_a_checkpoint_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("foreign").mkdir()
    Path("foreign", METADATA).write_bytes(pickle.dumps(_Runs()))
    for words in (["checkpoint", "foreign", "foreign"], ["run", "load=foreign"]):
        assert main(words) == 2
        error = capsys.readouterr().err
        assert "it names posix.mkdir, which is no part of a checkpoint's metadata" in error
        assert len(error.splitlines()) == 1 and not Path("ran").exists()
