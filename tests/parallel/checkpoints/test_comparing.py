"""`shardproof checkpoint A B`: the first tensor that differs, and its cause where that is certain."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shardproof.parallel.checkpoints.comparing import CheckpointComparison, cause, compare
from shardproof.parallel.checkpoints.folder import commit, write_part
from shardproof.parallel.checkpoints.state import CheckpointError
from shardproof.parallel.communication.layout import Cut, Placement, pieces, shard
from shardproof.reports.commands.cli import main
from tests.parallel.ranks import numbers

QKV, W13, WO = "layers.0.attention.wqkv.weight", "layers.0.mlp.w13.weight", "layers.0.attention.wo.weight"
TABLE, RNG = "embedding.tokens.weight", "rng.tp0.cp0.dp0.pp0.default"
State = dict[str, Tensor]


def _state() -> State:
    found = {f"model.{TABLE}": numbers(11, 5, seed=1), f"model.{QKV}": numbers(24, 5, seed=2)}
    found |= {f"model.{WO}": numbers(5, 12, seed=3), f"model.{W13}": numbers(28, 5, seed=4)}
    for name in (TABLE, QKV, WO, W13):
        whole = found[f"model.{name}"]
        found |= {f"optimizer.state.{name}.exp_avg": whole / 7, f"optimizer.state.{name}.exp_avg_sq": whole.square()}
        found[f"optimizer.state.{name}.step"] = torch.tensor(2.0)
    return found | {"train.steps": torch.tensor(2), "train.ranks": torch.tensor([2, 1, 1, 1]), RNG: torch.arange(9)}


def _saved(folder: Path, state: Mapping[str, Tensor], ranks: int = 2, blocks: tuple[int, ...] = ()) -> str:
    """A checkpoint whose matrices were written by these ranks, W13 in these blocks."""
    for rank in range(ranks):
        at, boxes = {"tp": (rank, ranks)}, {}
        for key, full in state.items():
            place = Placement(shape=tuple(full.shape))
            if full.dim() == 2:
                rows = blocks if W13 in key else (-(-len(full) // ranks) * ranks,)
                place = Placement(shape=place.shape, cuts=(Cut(axis="tp", blocks=rows),))
            if place.cuts or rank == 0:
                boxes[key] = pieces(shard(full, place, at), place, at)
        write_part(folder, rank, boxes)
    commit(folder, ranks)
    return str(folder)


def _compared(tmp_path: Path, key: str, change: Callable[[Tensor], Tensor]) -> CheckpointComparison:
    state = _state()
    one = _saved(tmp_path / "a", state)
    return compare(one, _saved(tmp_path / "b", state | {key: change(state[key])}))


def test_layouts_do_not_matter_and_streams_of_another_are_left_out(tmp_path: Path) -> None:
    one = _saved(tmp_path / "a", _state())
    found = compare(one, _saved(tmp_path / "b", _state() | {"train.ranks": torch.tensor([7, 1, 1, 1])}, 7, (14, 14)))
    assert found.first is None and not found.others
    assert [(kind.kind, kind.tensors, kind.elements, kind.differ) for kind in found.kinds] == [
        ("parameters", 4, 55 + 120 + 60 + 140, 0),
        ("moments", 8, 2 * 375, 0),
        ("counts of optimizer steps", 4, 4, 0),
        ("counters", 1, 1, 0),
    ]
    assert found.notes == (
        "A was written at tp=2 cp=1 dp=1 pp=1",
        "B was written at tp=7 cp=1 dp=1 pp=1",
        "states of random streams belong to ranks of one layout, so they are not compared",
    )


def test_the_first_difference_has_its_place_its_size_and_its_ranks(tmp_path: Path) -> None:
    def changed(whole: Tensor) -> Tensor:
        whole = whole.clone()
        whole[15, 1:4] += 2
        whole[20, 2] = torch.nan
        return whole

    found = _compared(tmp_path, f"optimizer.state.{QKV}.exp_avg", changed)
    assert found.first is not None and not found.others
    assert found.first.what == f"optimizer.state.{QKV}.exp_avg differs"
    assert found.first.where == "15 20 of 24 rows, 1-3 of 5 columns"
    assert found.first.error.startswith("4 of 120 elements, by at most ") and "at [15, 1])" in found.first.error
    assert found.first.pieces == (
        "in A rank 1 wrote 12-23 x 0-4 there, one of 2 chunks; in B rank 1 wrote 12-23 x 0-4 there, one of 2 chunks"
    )
    assert found.first.cause == "", "no mistake of a layout does this"
    assert {kind.kind: kind.differ for kind in found.kinds if kind.differ} == {"moments": 1}


def test_streams_of_ranks_that_lie_alike_are_compared(tmp_path: Path) -> None:
    found = _compared(tmp_path, RNG, lambda state: state.flip(0))
    assert found.first is not None and found.first.key == RNG


CAUSES: dict[str, tuple[str, Callable[[Tensor], Tensor], str]] = {
    "padding": (TABLE, lambda w: torch.cat([w, w[:5]]), "B kept 5 rows of the padded vocabulary behind the 11"),
    "another": (W13, lambda w: w / 7, f"B holds there what A holds as optimizer.state.{W13}.exp_avg"),
    "zero": (WO, torch.zeros_like, "B is zero throughout: nothing was written there"),
    "rounded": (WO, lambda w: w.bfloat16().to(w), "B is A rounded to bfloat16"),
    "permuted": (WO, lambda w: w.t(), "B is A transposed"),
    "none": (WO, lambda w: w.cos(), ""),
}


@pytest.mark.parametrize("name", CAUSES)
def test_what_gives_the_numbers_of_b_is_named(name: str) -> None:
    parameter, change, words = CAUSES[name]
    state, key = _state(), f"model.{parameter}"
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    found = cause(key, state[key], change(state[key]), state.__getitem__, shapes)
    assert words in found if words else not found, found


def test_the_command_prints_six_lines_and_ends_with_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = _state()
    one = _saved(tmp_path / "a", state)
    other = _saved(tmp_path / "b", state | {f"model.{W13}": state[f"model.{W13}"].roll(14, 0)})
    assert main(["checkpoint", one, other]) == 1
    lines = capsys.readouterr().out.splitlines()
    heads = [line.split(":")[0] for line in lines[-6:]]
    assert heads == ["what", "where", "error", "pieces", "causes", "repeat"]
    assert lines[-1] == f"repeat: shardproof checkpoint {one} {other} --tensor model.{W13}"
    assert main(["checkpoint", one, other, "--tensor", f"model.{W13}", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["first"]["key"] == f"model.{W13}"
    assert main(["checkpoint", one, other, "--tensor", "optimizer*"]) == 0
    assert "pass: all tensors are the same bit for bit" in capsys.readouterr().out


def test_other_tensors_and_parameters_alone(tmp_path: Path) -> None:
    state = _state()
    one = _saved(tmp_path / "a", state)
    del state[f"model.{W13}"]
    state["model.layers.0.mlp.w1.weight"] = numbers(14, 5)
    found = compare(one, _saved(tmp_path / "b", state)).first
    assert found is not None and found.what == f"model.{W13} is in A and not in B"
    assert found.cause == "A is of a model with fuse_mlp=true, the other is not"
    bare = compare(one, _saved(tmp_path / "c", {key: x for key, x in _state().items() if key.startswith("model.")}))
    assert bare.first is None and [kind.kind for kind in bare.kinds] == ["parameters"]
    assert "B holds parameters alone, so nothing else is compared" in bare.notes


def test_what_is_no_checkpoint_ends_with_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = _saved(tmp_path / "a", _state())
    (tmp_path / "empty").mkdir()
    assert main(["checkpoint", one, str(tmp_path / "empty")]) == 2
    assert "empty: holds no checkpoint: it has no file .metadata; legal: " in capsys.readouterr().err
    assert main(["checkpoint", str(tmp_path / "gone"), one]) == 2
    assert "gone: is no folder; legal: " in capsys.readouterr().err
    with pytest.raises(CheckpointError, match=r"has no tensor to compare that fits lora\*; legal: model"):
        compare(one, one, "lora*")
    file = next(Path(one).glob("__1_*.distcp"))
    file.write_bytes(file.read_bytes()[:-9])
    assert main(["checkpoint", one, one]) == 2
    assert "is torn" in capsys.readouterr().err
