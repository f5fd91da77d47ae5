"""`shardproof checkpoint A B`: the first tensor that differs, and its cause where that is certain."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from parallel.checkpoints.causes import cause
from parallel.checkpoints.comparing import CheckpointComparison, compare
from parallel.checkpoints.errors import CheckpointError
from parallel.checkpoints.folder import commit, next_data, write_part
from parallel.communication.layout import Box, Cut, Placement, pieces, shard
from reports.commands.cli import main
from tests.parallel.ranks import numbers

QKV, W13, WO = "layers.0.attention.wqkv.weight", "layers.0.mlp.w13.weight", "layers.0.attention.wo.weight"
TABLE, RNG = "embedding.tokens.weight", "rng.tp0.cp0.dp0.pp0.default"
HEADS, KV_HEADS, WIDTH = 6, 3, 2
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
    data = next_data(folder)
    for rank in range(ranks):
        at, boxes = {"tp": (rank, ranks)}, {}
        for key, full in state.items():
            cut = (
                Cut(axis="tp", blocks=blocks if W13 in key else (-(-len(full) // ranks) * ranks,))
                if full.dim()
                else None
            )
            place = Placement(shape=tuple(full.shape), cuts=(cut,) if cut and full.dim() == 2 else ())
            if place.cuts or rank == 0:
                boxes[key] = [
                    Box(local=b.local, offsets=b.offsets, global_shape=b.global_shape)
                    for b in pieces(shard(full, place, at), place, at)
                ]
        write_part(folder, data, rank, boxes)
    commit(folder, data, ranks)
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


def _joined(length: int, blocks: tuple[int, ...]) -> Tensor:
    place = Placement(shape=(length,), cuts=(Cut(axis="tp", blocks=blocks),))
    return torch.cat([shard(torch.arange(length), place, {"tp": (rank, 2)}) for rank in range(2)])


def _cut_wrongly(whole: Tensor, right: tuple[int, ...], wrong: tuple[int, ...]) -> Tensor:
    """What two ranks held by the right cut, written by the wrong one."""
    found = torch.empty_like(whole)
    found[_joined(len(whole), wrong)] = whole[_joined(len(whole), right)]
    return found


def _thirds(whole: Tensor) -> Tensor:
    """Groups (queries of the group, its key, its value) -> all queries, all keys, all values."""
    groups = whole.view(KV_HEADS, HEADS // KV_HEADS + 2, WIDTH, -1)
    parts = [groups[:, :-2], groups[:, -2], groups[:, -1]]
    return torch.cat([part.reshape(-1, whole.shape[1]) for part in parts])


def _shifted(whole: Tensor) -> Tensor:
    flat = whole.flatten().clone()
    flat[40:] = flat[37:-3].clone()
    return flat.view_as(whole)


CAUSES: dict[str, tuple[str, Callable[[Tensor], Tensor], str]] = {
    "thirds": (QKV, _thirds, "B has all queries, .* no kv groups (6 heads and 3 kv heads of 2 rows)"),
    "thirds cut": (
        QKV,
        lambda w: _cut_wrongly(w, (24,), (8, 8, 8)),
        "query, key and value were cut as thirds over 2 ranks where B",
    ),
    "plain w13": (
        W13,
        lambda w: _cut_wrongly(w, (14, 14), (28,)),
        "gate and up were cut as one block over 2 ranks where B was written",
    ),
    "plain w13, read": (
        W13,
        lambda w: _cut_wrongly(w, (28,), (14, 14)),
        "gate and up were cut as one block over 2 ranks where B was read",
    ),
    "halves": (W13, lambda w: w.roll(14, 0), "gate and up are exchanged"),
    "padding": (TABLE, lambda w: torch.cat([w, w[:5]]), "B kept 5 rows of the padded vocabulary behind the 11"),
    "heads": (WO, lambda w: w[:, [8, 9, 10, 11, *range(8)]], "columns .* in blocks of 4: heads are permuted"),
    "bucket": (
        W13,
        _shifted,
        "elements of A lie 3 places later in B: padding of a bucket or a shard was taken for data",
    ),
    "another": (W13, lambda w: w / 7, f"B holds there what A holds as optimizer.state.{W13}.exp_avg"),
    "zero": (WO, torch.zeros_like, "B is zero throughout: nothing was written there"),
    "rounded": (WO, lambda w: w.bfloat16().to(w), "B is A rounded to bfloat16"),
    "summed": (WO, lambda w: 2 * w, "B is A times 2"),
    "transposed": (WO, lambda w: w.t(), "B is A transposed"),
    "none": (WO, lambda w: w.cos(), ""),
}


@pytest.mark.parametrize("name", CAUSES)
def test_a_mistake_of_a_layout_is_named(name: str) -> None:
    parameter, change, words = CAUSES[name]
    state, key = _state(), f"model.{parameter}"
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    found = cause(key, state[key], change(state[key]), state.__getitem__, shapes)
    first, _, last = words.partition(" .* ")
    assert (first in found and last in found) if words else not found, found


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
    for words in ([], [one, "--like", one], ["--export", one], [one, "--export", one, "--like", one]):
        assert main(["checkpoint", one, *words]) == 2
        assert "needs B, or --export and --like without B; legal: " in capsys.readouterr().err
    assert main(["checkpoint", one, "--export", str(tmp_path / "new"), "--like", one]) == 2
    assert (
        "is of no other system; legal: a folder that save_pretrained or Megatron-Core wrote" in capsys.readouterr().err
    )
    assert main(["checkpoint", str(tmp_path / "gone"), one]) == 2
    assert "gone: is no folder; legal: " in capsys.readouterr().err
    with pytest.raises(CheckpointError, match=r"has no tensor to compare that fits lora\*; legal: model"):
        compare(one, one, "lora*")
    file = next(Path(one).glob("data-*/rank-1/*.distcp"))
    file.write_bytes(file.read_bytes()[:-9])
    assert main(["checkpoint", one, one]) == 2
    assert "is torn" in capsys.readouterr().err
