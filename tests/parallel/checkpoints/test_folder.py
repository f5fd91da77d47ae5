"""The files of a checkpoint: broken ones change nothing, torch reads ours, and ours are named as torch names them."""

import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict_loader import load as torch_load
from torch.distributed.checkpoint.state_dict_saver import save as torch_save

from shardproof.parallel.checkpoints.folder import commit, write_part
from shardproof.parallel.checkpoints.saving import load
from shardproof.parallel.checkpoints.state import CheckpointError
from shardproof.parallel.communication.layout import Box
from shardproof.reference.case import Case, CaseError
from shardproof.reference.checkpoints.foreign import stored_tensors
from shardproof.reference.checkpoints.torch_format import METADATA
from shardproof.reference.model.parameters import weights
from tests.parallel.checkpoints.layouts import MODEL, begun, full_tensors, relaid, trained
from tests.parallel.ranks import on_ranks

CASE = Case.parse(f"{MODEL} layers=1 mode=tp tp=2 micro=2 optimizer=adamw steps=1")
OTHER = Case.parse(f"{MODEL} layers=1 mode=tp-sp tp=3 micro=2 optimizer=adamw steps=1")
WEIGHT = "model.layers.0.mlp.w1.weight"
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "a"
    trained(CASE.but(save=str(folder)))
    return folder


def _data_file(folder: Path) -> Path:
    return next(folder.glob("__1_*.distcp"))


def _rewritten(file: Callable[[Path], Path], change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda folder: file(folder).write_bytes(change(file(folder).read_bytes()))


_torn = _rewritten(_data_file, lambda content: content[:-100])
_torn_metadata = _rewritten(lambda folder: folder / METADATA, lambda content: content[:-9])


def _changed(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """The keys of the metadata changed: tensors that are missing, renamed, or of other forms."""

    def apply(folder: Path) -> None:
        metadata = pickle.loads((folder / METADATA).read_bytes())
        change(metadata.state_dict_metadata)
        (folder / METADATA).write_bytes(pickle.dumps(metadata))

    return apply


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda folder: (folder / METADATA).unlink(), "holds no checkpoint: it has no file .metadata"),
    "no folder": (shutil.rmtree, "is no folder"),
    "torn": (_torn, r"the file __1_0.distcp is torn: it has \d+ bytes of at least \d+"),
    "torn metadata": (_torn_metadata, ".metadata cannot be read"),
    "missing file": (lambda folder: _data_file(folder).unlink(), "__1_0.distcp is missing"),
    "missing tensor": (_changed(lambda held: held.pop(WEIGHT)), f"1 of .* tensors are missing, the first is {WEIGHT}"),
    "foreign tensor": (
        _changed(lambda held: held.update({"model.lora": held["train.steps"]})),
        "1 tensors are not of this model or training, the first is model.lora",
    ),
    "other shape": (
        _changed(lambda held: held.update({WEIGHT: held["model.embedding.tokens.weight"]})),
        rf"{WEIGHT} has the shape \(389, 48\), not \(42, 48\)",
    ),
    "missing chunk": (
        _changed(lambda held: held[WEIGHT].chunks.pop()),
        f"chunks of {WEIGHT} hold 1008 of its 2016 elements",
    ),
}


@pytest.mark.parametrize("how", BROKEN)
def test_what_is_broken_is_refused_and_the_old_state_stays(saved: Path, tmp_path: Path, how: str) -> None:
    breaks, message = BROKEN[how]
    folder = tmp_path / "broken"
    shutil.copytree(saved, folder)
    breaks(folder)

    def program(_: int) -> None:
        rank, optimizer = begun(OTHER)
        before = {name: tensor.clone() for name, tensor in rank.model.named_parameters()}
        with pytest.raises(CheckpointError, match=message):
            load(rank, optimizer, folder)
        assert all(torch.equal(before[name], tensor) for name, tensor in rank.model.named_parameters())
        assert not optimizer.state

    on_ranks(OTHER.world_size, program)


def test_nan_in_a_checkpoint_is_refused(tmp_path: Path, saved: Path) -> None:
    tensors = full_tensors(saved) | {"train.ranks": torch.tensor([2, 1, 1, 1])}
    tensors[WEIGHT] = tensors[WEIGHT].clone().index_fill(0, torch.tensor([41]), torch.nan)
    torch_save(tensors, storage_writer=FileSystemWriter(tmp_path / "nan"), no_dist=True)
    with pytest.raises(Exception, match=f"48 elements of {WEIGHT} were not read, or are NaN there"):
        relaid(OTHER, tmp_path / "nan", tmp_path / "again")


def test_the_dense_model_refuses_too(tmp_path: Path, saved: Path) -> None:
    with pytest.raises(CaseError, match="holds no checkpoint"):
        stored_tensors(CASE.but(load=str(tmp_path)))
    shutil.copytree(saved, tmp_path / "torn")
    _torn_metadata(tmp_path / "torn")
    torch_save(full_tensors(saved) | {"model.lora": torch.ones(2)}, checkpoint_id=tmp_path / "more", no_dist=True)
    with pytest.raises(CaseError, match="1 tensors are not of this one, the first is lora; legal: "):
        weights(CASE.but(load=str(tmp_path / "more")), torch.device("cpu"))
    with pytest.raises(CaseError, match="torch cannot read"):
        stored_tensors(CASE.but(load=str(tmp_path / "torn")))


def test_torchs_loaders_read_ours_and_ours_reads_torchs(saved: Path, tmp_path: Path) -> None:
    dcp_to_torch_save(saved, tmp_path / "whole.pt")
    whole: dict[str, Tensor] = torch.load(tmp_path / "whole.pt")
    mine = full_tensors(saved)
    assert set(mine) | {"train.ranks"} == {key for key in whole if not key.startswith("rng.tp")}
    again = {key: torch.full_like(tensor, -1) for key, tensor in mine.items()}
    torch_load(again, storage_reader=FileSystemReader(saved), no_dist=True)
    assert all(torch.equal(mine[key], again[key]) and torch.equal(mine[key], whole[key]) for key in mine)
    torch_save(dict(whole), storage_writer=FileSystemWriter(tmp_path / "by_torch"), no_dist=True)
    relaid(OTHER, tmp_path / "by_torch", tmp_path / "back")
    back = full_tensors(tmp_path / "back")
    assert all(torch.equal(mine[key], back[key]) for key in mine)


def test_streams_are_restored_at_the_same_layout_and_nowhere_else(saved: Path) -> None:
    def restored(case: Case) -> list[bool]:
        def program(_: int) -> bool:
            rank, optimizer = begun(case)
            streams = rank.dropout.streams
            seeded = streams.state_dict()
            with streams.fork("model-parallel-rng") as generator:
                torch.rand(7, generator=generator)
            load(rank, optimizer, saved)
            return all(torch.equal(state, seeded[name]) for name, state in streams.state_dict().items())

        found: list[bool] = on_ranks(case.world_size, program)
        return found

    assert restored(CASE) == [True] * 2
    assert restored(OTHER) == [False] * 3


def _write(folder: Path, ranks: int, number: float = 1.0) -> None:
    """Each of these ranks writes its rows of a tensor full of a number."""
    for rank in range(ranks):
        local = torch.full((4 // ranks, 3), number)
        box = Box(local=local, offsets=(4 // ranks * rank, 0), global_shape=(4, 3))
        write_part(folder, rank, {"model.w": [box]})


def test_the_folder_is_that_of_torch_and_a_save_replaces_the_former_one(tmp_path: Path) -> None:
    for ranks, number in ((4, 1.0), (2, 2.0)):
        _write(tmp_path, ranks, number)
        with pytest.raises(CaseError, match="holds no checkpoint"):
            full_tensors(tmp_path)
        commit(tmp_path, ranks)
        assert full_tensors(tmp_path)["model.w"].unique().tolist() == [number]
        files = {path.name for path in tmp_path.iterdir()}
        assert files == {METADATA, *(f"__{rank}_0.distcp" for rank in range(ranks))}


def test_parts_that_do_not_tile_a_tensor_are_no_checkpoint(tmp_path: Path) -> None:
    _write(tmp_path, 2)
    box = Box(local=torch.ones(2, 3), offsets=(1, 0), global_shape=(4, 3))
    write_part(tmp_path, 1, {"model.w": [box]})
    with pytest.raises(CheckpointError, match="chunks of model.w overlap"):
        commit(tmp_path, 2)
    write_part(tmp_path, 1, {"model.w": [replace(box, offsets=(2, 0), local=torch.ones(1, 3))]})
    with pytest.raises(CheckpointError, match="chunks of model.w hold 9 of its 12 elements"):
        commit(tmp_path, 2)
    assert not (tmp_path / METADATA).exists()
