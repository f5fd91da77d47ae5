"""Parameters find their partners by their initial values, whatever they are called and however they are cut."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardproof.harness.outcome.merging import merge_outcomes
from shardproof.harness.parity.partners import Partners, find_partners
from shardproof.harness.parity.recorded import Launch, read_launch
from shardproof.harness.parity.stages import names_by_stage, names_to_begin_with, pipeline_stages
from shardproof.harness.programs.values import ValueRow, append_values, write_about

pytest.importorskip("safetensors", reason="needs safetensors")

Local = tuple[Tensor, Mapping[str, Any]]
"""A rank's tensor, and what its row states."""


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def recorded(
    folder: Path, ranks: Sequence[Mapping[str, Tensor | Local]], about: Sequence[Mapping[str, Any]] = ()
) -> Launch:
    """A launch whose ranks have these parameters, and these facts."""
    folder.mkdir(exist_ok=True)
    for rank, values in enumerate(ranks):
        rows, tensors = [], {}
        for number, (name, given) in enumerate(values.items()):
            local, stated = given if isinstance(given, tuple) else (given, {})
            words: dict[str, Any] = {"dtype": "float32", "shape": tuple(local.shape), "key": str(number), **stated}
            rows.append(ValueRow(kind="param", step=0, name=name, **words))
            tensors[str(number)] = local.contiguous()
        append_values(folder, rank, 0, rows, tensors)
        write_about(folder, rank, about[rank] if about else {})
    return read_launch(folder)


def joined(launch: Launch, partners: Partners) -> dict[str, Tensor]:
    """The first launch's parameters, as the second one's ranks hold them together."""
    outcomes: list[dict[str, Any]] = []
    for rank in launch.ranks:
        own: dict[str, Any] = {}
        for row in rank.rows:
            for name, block in partners.placements[rank.rank, row.name].blocks_of(row, rank.tensor(row)):
                own.setdefault(name, []).append(block)
        outcomes.append(own)
    merged = merge_outcomes(outcomes)
    assert merged.flaws == ()
    return dict(merged.tensors)


FUSED = {"a.q.weight": drawn(4, 6, seed=1), "a.k.weight": drawn(2, 6, seed=2), "a.v.weight": drawn(2, 6, seed=3)}
BIASES = {"a.q.bias": torch.zeros(4), "a.k.bias": torch.zeros(2), "a.v.bias": torch.zeros(2)}
W, ROWS = drawn(8, 6, seed=4), [0, 1, 4, 5]
LAYERS = {f"layers.{n}.{leaf}": drawn(3, 3, seed=9 + n) if leaf == "w.weight" else torch.ones(3)
          for n in range(4) for leaf in ("w.weight", "norm.weight")}  # fmt: skip
CASES: Mapping[str, tuple[Mapping[str, Tensor], Sequence[Mapping[str, Any]]]] = {
    "whole on every rank": ({"w": W}, [{"w": W}, {"w": W}]),
    "cut along dim 0": ({"w": W}, [{"w": W[:4]}, {"w": W[4:]}]),
    "cut along dim 1, with replicas": ({"w": W}, [{"w": W[:, :3]}, {"w": W[:, 3:]}] * 2),
    "ranks in another order": ({"w": W}, [{"w": W[4:]}, {"w": W[:4]}]),
    "interleaved": ({"w": W}, [{"w": W[ROWS]}, {"w": W[[2, 3, 6, 7]]}]),
    "uneven": ({"w": W}, [{"w": W[:5]}, {"w": W[5:]}]),
    "padded at the end": ({"w": W[:7]}, [{"w": W[:4]}, {"w": torch.cat([W[4:7], torch.zeros(1, 6)])}]),
    "named otherwise": ({"head.weight": W}, [{"lm_head.weight": W}]),
    "the one that is left of its numbers": (
        {**LAYERS, "norm.weight": torch.ones(3)},
        [{**LAYERS, "final.weight": torch.ones(3)}] * 2,
    ),
    "three weights in one": (
        {**FUSED, **BIASES},
        [
            {
                "a.qkv.weight": torch.cat([one.chunk(2)[rank] for one in FUSED.values()]),
                "a.qkv.bias": torch.zeros(4),
            }
            for rank in range(2)
        ],
    ),
    "one weight in three": (
        {"a.qkv.weight": torch.cat([*FUSED.values()]), "a.qkv.bias": torch.zeros(8)},
        [{**FUSED, **{name: torch.zeros(len(one)) for name, one in BIASES.items()}}],
    ),
    "a bias of zeros beside a cut weight": (
        {"l.weight": W, "l.bias": torch.zeros(8)},
        [{"l.weight": W[4:], "l.bias": torch.zeros(4)}, {"l.weight": W[:4], "l.bias": torch.zeros(4)}],
    ),
    "stages that count their layers from 0": (
        LAYERS,
        [
            {name.replace(str(2 * stage + n), str(n)): LAYERS[name] for n in range(2) for name in LAYERS
             if name.startswith(f"layers.{2 * stage + n}.")}
            for stage in range(2)
        ],
    ),
    "stages as sequences": (
        LAYERS,
        [
            {f"{n}.{name.split('.', 2)[2]}": LAYERS[name] for n in range(2) for name in LAYERS
             if name.startswith(f"layers.{2 * stage + n}.")}
            for stage in range(2)
        ],
    ),
    "as the program states": (
        {"w": torch.zeros(8, 6)},
        [
            {"w": (torch.zeros(4, 6), {"global_shape": (8, 6), "offsets": (4 * place, 0), "stated_by": "dtensor"})}
            for place in (1, 0)
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_parts_are_put_where_their_numbers_stand(case: str, tmp_path: Path) -> None:
    first, ranks = CASES[case]
    launch = recorded(tmp_path, ranks)
    partners = find_partners(first, {}, launch)
    assert partners.unplaced == ()
    assert all(placement.known for placement in partners.placements.values())
    found = joined(launch, partners)
    assert {name: bool(torch.equal(found[name], tensor)) for name, tensor in first.items()} == dict.fromkeys(
        first, True
    )


def test_modules_of_a_stage_have_the_first_launchs_paths(tmp_path: Path) -> None:
    partners = find_partners(LAYERS, {}, recorded(tmp_path, CASES["stages that count their layers from 0"][1]))
    assert partners.path(1, "layers.1.w") == "layers.3.w" and partners.path(0, "layers.1") == "layers.1"


CHAIN = [{"fed_by": source} for source in (-1, 3, 1, 0)]
"""Samples pass through the ranks 0, 3, 1, 2."""
ENDS = {"tokens.weight": drawn(5, 3, seed=20), "norm.weight": torch.ones(3), "head.weight": drawn(5, 3, seed=21)}


def staged_by_order(before: str) -> list[dict[str, Tensor]]:
    """By rank, one of four layers with other numbers than the first launch's, on the stage of its place in CHAIN."""
    layer = {
        f"{before}0.{leaf}": drawn(*LAYERS[f"layers.0.{leaf}"].shape, seed=30) for leaf in ("w.weight", "norm.weight")
    }
    ends = [
        {"tokens.weight": ENDS["tokens.weight"]},
        {},
        {name: ENDS[name] for name in ("norm.weight", "head.weight")},
        {},
    ]
    return [{**layer, **end} for end in ends]


@pytest.mark.parametrize("before", ["layers.", ""], ids=["a list of layers", "a sequence"])
def test_where_no_numbers_tell_it_the_order_of_the_stages_says_which_layer_it_is(before: str, tmp_path: Path) -> None:
    launch = recorded(tmp_path / "b", staged_by_order(before), CHAIN)
    partners = find_partners({**LAYERS, **ENDS}, {}, launch)
    for rank, layer in enumerate((0, 2, 3, 1)):
        placement = partners.placements[rank, f"{before}0.w.weight"]
        assert (placement.names, placement.known) == ((f"layers.{layer}.w.weight",), False)
        assert partners.path(rank, f"{before}0.w") == f"layers.{layer}.w"
    assert pipeline_stages(launch) == [(0,), (3,), (1,), (2,)]
    cycle = recorded(tmp_path / "c", staged_by_order("layers."), [{"fed_by": source} for source in (-1, 3, 1, 2)])
    assert names_by_stage(LAYERS, cycle) == {}, "no order"
    scattered = recorded(tmp_path / "d", [LAYERS, LAYERS], [{"fed_by": -1}, {"fed_by": 0}])
    assert names_by_stage(LAYERS, scattered) == {} and pipeline_stages(scattered) == [], "data ranks that rank 0 feeds"


def test_what_can_begin_alike_has_a_name_of_the_first_launch(tmp_path: Path) -> None:
    first = {**LAYERS, **ENDS, "shared.weight": W}
    launch = recorded(
        tmp_path / "b",
        [
            {
                "shared.weight": drawn(8, 6, seed=40),
                "0.weight": drawn(5, 3, seed=41),
                "1.w.weight": drawn(3, 3),
                "1.norm.weight": torch.ones(3),
            },
            *({"0.w.weight": drawn(3, 3), "0.norm.weight": torch.ones(3)} for _ in range(2)),
            {
                "0.w.weight": drawn(3, 3),
                "0.norm.weight": torch.ones(3),
                "1.weight": torch.ones(3),
                "2.weight": drawn(5, 3),
                "out.weight": drawn(8, 6, seed=40),
            },
        ],
        [
            {"fed_by": -1, "drawn_parts": {"shared.weight": "a"}},
            {"fed_by": 0},
            {"fed_by": 1},
            {"fed_by": 2, "drawn_parts": {"out.weight": "a", "2.weight": "b"}},
        ],
    )
    names = names_to_begin_with(recorded(tmp_path / "a", [first]), launch)
    assert names[0, "1.w.weight"] == "layers.0.w.weight" and names[3, "0.w.weight"] == "layers.3.w.weight"
    assert names[3, "out.weight"] == "shared.weight", "tied: drawn alike"
    assert names[0, "0.weight"] == "tokens.weight" and names[3, "2.weight"] == "head.weight", "in one order"
    assert names[3, "1.weight"] == "norm.weight" and (0, "shared.weight") not in names


def test_a_part_of_another_start_lies_where_the_ranks_other_parts_do(tmp_path: Path) -> None:
    first, ranks = {"a": W, "b": drawn(8, 6, seed=5)}, [{"a": W[4:], "b": drawn(4, 6)}, {"a": W[:4], "b": drawn(4, 6)}]
    partners = find_partners(first, {}, recorded(tmp_path, ranks))
    places = [partners.placements[rank, "b"] for rank in range(2)]
    assert [(one.pieces[0].offset, one.known) for one in places] == [(4, False), (0, False)]


def test_tied_weights_of_two_stages_are_replicas_of_one(tmp_path: Path) -> None:
    launch = recorded(tmp_path, [{"tokens.weight": W}, {"head.weight": W}])
    partners = find_partners({"tokens.weight": W}, {"head.weight": "tokens.weight"}, launch)
    assert [placement.names for placement in partners.placements.values()] == [("tokens.weight",)] * 2


def test_what_the_first_launch_has_not_has_no_partner(tmp_path: Path) -> None:
    partners = find_partners({"w": W}, {}, recorded(tmp_path, [{"w": W, "other": drawn(5, 5)}]))
    assert partners.unplaced == ((0, "other"),)
    ones = {"a": torch.ones(3), "b": torch.ones(3)}
    partners = find_partners(ones, {}, recorded(tmp_path / "two", [{"c": torch.ones(3)}]))
    assert partners.unplaced == ((0, "c"),), "either of two"
    partners = find_partners({"a": torch.ones(3)}, {}, recorded(tmp_path / "one", [{"c": ones["a"], "d": ones["b"]}]))
    assert partners.unplaced == ((0, "c"), (0, "d"))
