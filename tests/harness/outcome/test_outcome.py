"""Outcomes and merging: every kind of value becomes blocks, and every flaw of a layout is named before any number.

Outcomes that are refused: only plain tensors of numbers under names of text pass. Where shards of any extent overlap
they agree in every bit, or are a conflict; what none holds is a gap.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.tensor import Partial, Placement, Replicate
from torch.distributed.tensor import Shard as ShardPlacement
from torch.distributed.tensor.placement_types import _StridedShard

from shardproof.harness.outcome.blocks import blocks, localize
from shardproof.harness.outcome.merging import match_truth, merge_outcomes, same_bits, state_differences
from shardproof.harness.protocols import Shard


def merged_from(*outcomes: Mapping[str, object]) -> tuple[Mapping[str, Tensor], list[tuple[str, str]]]:
    result = merge_outcomes([localize(outcome) for outcome in outcomes])
    return result.tensors, [(flaw.name, flaw.kind) for flaw in result.flaws]


FULL = torch.arange(24, dtype=torch.float64).reshape(6, 4)


def test_full_tensors_and_numbers_that_agree_merge_to_themselves() -> None:
    (block,) = blocks(torch.ones(3, requires_grad=True) * 2)
    assert block.whole and block.offsets == (0,) and not block.local.requires_grad, "no graph is held"
    tensors, flaws = merged_from(*({"a": FULL.clone(), "loss/0": 1.5, "count": 3} for _ in range(2)))
    assert flaws == []
    assert torch.equal(tensors["a"], FULL)
    assert tensors["loss/0"].dtype == torch.float64 and float(tensors["loss/0"]) == 1.5
    assert tensors["count"].dtype == torch.int64


@given(st.data())
def test_any_cut_into_boxes_merges_back(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple))
    full = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
    boxes: list[tuple[slice, ...]] = [()]
    for size in shape:
        edges = [0, *sorted(data.draw(st.sets(st.integers(1, max(size - 1, 1)), max_size=min(3, size - 1)))), size]
        boxes = [(*box, slice(a, b)) for box in boxes for a, b in zip(edges, edges[1:], strict=False)]
    world_size = data.draw(st.integers(1, 4))
    outcomes: list[dict[str, list[Shard]]] = [{"w": []} for _ in range(world_size)]
    for box in boxes:
        holders = data.draw(st.sets(st.integers(0, world_size - 1), min_size=1))
        for rank in holders:
            outcomes[rank]["w"].append(Shard(full[box].clone(), tuple(s.start for s in box), shape))
    tensors, flaws = merged_from(*outcomes)
    assert flaws == []
    assert torch.equal(tensors["w"], full)
    starts = [tuple(s.start for s in box) for box in boxes]
    lost = data.draw(st.sets(st.sampled_from(starts), min_size=1))
    holed = [{"w": [shard for shard in outcome["w"] if shard.offsets not in lost]} for outcome in outcomes]
    (flaw,) = merge_outcomes([localize(outcome) for outcome in holed]).flaws
    assert flaw.kind == "omission"
    assert len(lost) == len(boxes) or flaw.message.endswith(f"first missing at {min(lost)}")


def shard(start: int, stop: int, rows: int = 6, *, off: float = 0.0, dtype: torch.dtype = torch.float64) -> Shard:
    """These rows of the tensor, as part of one that has `rows`."""
    return Shard((FULL[start:stop] + off).to(dtype), (start, 0), (rows, 4))


NEXT = FULL.clone()
NEXT[2, 1] = torch.nextafter(NEXT[2, 1], torch.tensor(torch.inf, dtype=torch.float64))
BIT = "rank 1 differs from rank 0 in 1 of 24 elements, by up to 1.8e-15, first at (2, 1)"
MISSING = "a full tensor on rank 0 is not returned by rank 1; return it on every rank"
DTYPES = "the ranks disagree on the dtype: rank 0 returns float64, rank 1 float32"
BEYOND = "999999999999996 of 1000000000000000 elements are held by no rank; first missing at (4,)"
SHARED = "rank 1 differs from rank 0 in 8 of 8 elements, by up to 2, first at (2, 0) of what both hold, [2:4, 0:4]; "
SHARED += "rank 0 holds [0:4, 0:4] and rank 1 [2:6, 0:4]"
LAST = "4 of 24 elements are held by no rank; first missing at (5, 0)"
HOLE = "4 of 24 elements are held by no rank; first missing at (2, 0)"


@pytest.mark.parametrize(
    ("values", "kind", "ranks", "words"),
    [
        ([FULL, NEXT, FULL], "replica conflict", (1,), BIT),
        ([shard(0, 3), shard(3, 6), shard(0, 3), shard(3, 6, off=1)], "replica conflict", (3,), "rank 3 differs"),
        ([shard(0, 4), shard(2, 6, off=2)], "replica conflict", (0, 1), SHARED),
        (
            [shard(0, 4), shard(3, 5)],
            "omission",
            (0, 1),
            "4 of 24 elements are held by no rank; first missing at (5, 0)",
        ),
        ([shard(0, 2), shard(3, 6)], "omission", (), HOLE),
        ([[], []], "omission", (), ""),
        ([Shard(torch.ones(4), (0,), (10**15,))], "omission", (), BEYOND),
        ([FULL, None], "missing", (1,), MISSING),
        ([shard(0, 3), shard(3, 6, rows=7)], "shape", (), ""),
        ([shard(0, 3), shard(3, 6, dtype=torch.float32)], "dtype", (), DTYPES),
    ],
)
def test_a_flaw_is_named_with_its_ranks(values: list[Any], kind: str, ranks: tuple[int, ...], words: str) -> None:
    outcomes = [localize({} if value is None else {"a": value}) for value in values]
    (flaw,) = merge_outcomes(outcomes).flaws
    assert flaw.kind == kind and flaw.message.startswith(words) and (not ranks or flaw.ranks == ranks)


def test_parts_that_conflict_and_leave_a_gap_have_both_flaws() -> None:
    """A conflict hides no gap, nor a rank that returned nothing."""
    both = [("a", "replica conflict"), ("a", "omission")]
    assert merged_from({"a": shard(0, 4)}, {"a": shard(2, 5, off=1)})[1] == both
    assert merged_from({"a": shard(0, 4)}, {"a": shard(0, 4, off=1)})[1] == both
    assert merged_from({"a": FULL}, {}, {"a": FULL + 1})[1] == [("a", "missing"), ("a", "replica conflict")]


def test_the_same_bits_are_no_flaw_and_a_shard_need_not_be_on_every_rank() -> None:
    assert merged_from(*({"a": part} for part in (shard(0, 3), shard(3, 6)) * 2))[1] == []
    assert merged_from({"a": shard(0, 6)}, {})[1] == []
    heads = {"a": shard(0, 3)}, {"a": shard(0, 6)}, {"a": shard(3, 6)}  # two heads over three ranks
    assert torch.equal(merged_from(*heads)[0]["a"], FULL)


def test_tensors_of_classes_that_ranks_make_themselves_are_compared_as_tensors() -> None:
    def made() -> Tensor:
        return FULL.as_subclass(type("Weight", (Tensor,), {}))

    assert not merge_outcomes([localize({"w": made()}) for _rank in range(2)]).flaws


def test_replicas_of_nan_are_equal_and_signed_zeros_are_not() -> None:
    nan = torch.tensor([float("nan"), 1.0])
    assert same_bits(nan, nan.clone())
    assert not same_bits(torch.zeros(2), -torch.zeros(2))
    assert not same_bits(torch.zeros(2), torch.zeros(2, 1))
    assert not same_bits(torch.zeros(2), torch.zeros(2, dtype=torch.float64))
    assert state_differences(torch.zeros(2), torch.zeros(3)).text == "in form: (2,) float32 against (3,) float32"
    one = torch.tensor([1.0, 2.0, 3.0, torch.inf])
    words = "in 2 of 4 elements, NaN or infinite in 1, by up to 0.5, first at (0,)"
    assert state_differences(torch.tensor([torch.nan, 2.5, 3.0, torch.inf]), one).text == words
    assert state_differences(nan[0], torch.tensor(1.0)).text == "in 1 of 1 elements, NaN or infinite in 1"
    three = torch.tensor(3.0, dtype=torch.float64)  # a single element that was expanded has bits too
    assert same_bits(three.expand(1), three[None]) and not same_bits(three.expand(1), -three[None])
    assert same_bits(three.expand(1)[None], torch.full((1, 1), 3.0, dtype=torch.float64))
    assert same_bits(torch.zeros(0, 3), torch.zeros(0, 3))
    (block,) = blocks(torch.tensor([1 + 2j]).conj())  # a view that is resolved late
    assert same_bits(block.local, torch.tensor([1 - 2j]))


def test_other_shapes_and_kinds_than_the_truths_are_flaws() -> None:
    merged = merge_outcomes([localize({"a": FULL, "b": FULL, "c": FULL})])
    held = match_truth(merged, {"a": FULL, "b": FULL[:5], "c": FULL.long()})
    assert list(held.tensors) == ["a"]
    assert [(flaw.name, flaw.kind) for flaw in held.flaws] == [("b", "shape"), ("c", "dtype")]


@pytest.mark.parametrize(
    ("offsets", "shape", "words"),
    [((0,), (6, 4), "as many entries"), ((4, 0), (6, 4), "inside global_shape"), ((-1, 0), (6, 4), "legal: offsets=")],
)
def test_a_shard_outside_its_tensor_is_refused(offsets: tuple[int, ...], shape: tuple[int, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Shard(FULL[:3], offsets, shape)
    duck = SimpleNamespace(local=FULL[:3], offsets=offsets, global_shape=shape)
    with pytest.raises(ValueError, match="outcome 'a': offsets"):
        localize({"a": duck})


def a_mesh(shape: tuple[int, ...], rank: int) -> Any:
    """A device mesh as far as a block's place needs one: shape and this rank's coordinate."""
    coordinate = [int(i) for i in torch.unravel_index(torch.tensor(rank), shape)]
    return SimpleNamespace(shape=shape, get_coordinate=lambda: coordinate)


def distributed(
    monkeypatch: pytest.MonkeyPatch, local: Tensor, full: Tensor, mesh: Any, how: list[Placement]
) -> object:
    """Something that passes for a DTensor with this spec, without a process group."""
    fake = SimpleNamespace(device_mesh=mesh, shape=full.shape, placements=tuple(how), to_local=lambda: local)
    monkeypatch.setattr("torch.distributed.tensor.DTensor", SimpleNamespace)
    return fake


@pytest.mark.parametrize(
    ("shape", "mesh_shape", "placements"),
    [
        ((5, 4), (3,), [ShardPlacement(0)]),
        ((2, 4), (3,), [ShardPlacement(0)]),
        ((6, 4), (2, 2), [ShardPlacement(1), ShardPlacement(0)]),
        ((8, 3), (2, 2), [_StridedShard(0, split_factor=2), ShardPlacement(0)]),
        ((8, 3), (2, 3), [_StridedShard(0, split_factor=4), Replicate()]),
        ((7, 3), (2, 2), [Replicate(), ShardPlacement(1)]),
    ],
)
def test_dtensors_merge_by_their_spec(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], mesh_shape: tuple[int, ...], placements: list[Placement]
) -> None:
    full = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)
    outcomes = []
    for rank in range(torch.Size(mesh_shape).numel()):
        mesh, local = a_mesh(mesh_shape, rank), full
        for size, place, placement in zip(mesh_shape, mesh.get_coordinate(), placements, strict=True):
            if not placement.is_replicate():
                parts, _ = placement._split_tensor(local, size, with_padding=False)  # type: ignore[attr-defined]
                local = parts[place]
        outcomes.append({"w": distributed(monkeypatch, local.clone(), full, mesh, placements)})
    tensors, flaws = merged_from(*outcomes)
    assert flaws == []
    assert torch.equal(tensors["w"], full)


@pytest.mark.parametrize(("reduce_op", "scale"), [("sum", 1.0), ("avg", 0.5)])
def test_pending_partial_sums_are_reduced_outside_the_ranks(
    monkeypatch: pytest.MonkeyPatch, reduce_op: str, scale: float
) -> None:
    terms = [FULL * 2, FULL * 5]
    placements: list[Placement] = [Partial(reduce_op), Replicate()]
    values = [distributed(monkeypatch, terms[rank // 2], FULL, a_mesh((2, 2), rank), placements) for rank in range(4)]
    tensors, flaws = merged_from(*({"g": value} for value in values))
    assert flaws == []
    assert torch.equal(tensors["g"], FULL * 7 * scale)
    values[3] = distributed(monkeypatch, terms[1] + 1, FULL, a_mesh((2, 2), 3), placements)
    assert merged_from(*({"g": value} for value in values))[1] == [("g", "replica conflict")]


def test_a_dtensor_that_contradicts_its_spec_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = distributed(monkeypatch, FULL, FULL, a_mesh((2,), 0), [ShardPlacement(0)])
    with pytest.raises(ValueError, match=r"shape \(6, 4\); its placements say \(3, 4\)"):
        blocks(wrong)
    mixed = distributed(monkeypatch, FULL, FULL, a_mesh((2, 2), 0), [Partial("sum"), Partial("max")])
    with pytest.raises(ValueError, match="mixes Partial reductions"):
        blocks(mixed)


class Alien(Tensor):
    """A tensor by its own rules, as wrappers of packed numbers are."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Nothing is possible but what is done with it here."""
        return args[0] if func is torch.ops.aten.detach.default else NotImplemented


QUANTIZED = partial(torch.quantize_per_tensor, FULL.float(), 0.1, 0, torch.qint8)
NESTED = partial(torch.nested.nested_tensor, [FULL[0], FULL[1, :2]], layout=torch.jagged)
ALIEN = partial(Alien._make_subclass, Alien, FULL)
UNREADABLE = partial(torch.zeros(2, dtype=torch.uint8).view, torch.float4_e2m1fn_x2)


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch on its own quantized and nested tensors
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (FULL.to_sparse, "the layout is sparse_coo, and blocks are dense; legal: its to_dense()"),
        (QUANTIZED, "a quantized tensor has no numbers to compare; legal: its dequantize()"),
        (
            lambda: FULL.to("meta"),
            "the tensor lies on the meta device and has no numbers; legal: a tensor on the device that was given",
        ),
        (NESTED, "a nested tensor has no one shape; legal: one name for each of its parts"),
        (ALIEN, "Alien is a tensor only by its own rules; legal: the plain tensor inside of it"),
        (UNREADABLE, "numbers of float4_e2m1fn_x2 cannot be read; legal: a tensor of another dtype"),
        (lambda: SimpleNamespace(local="4", offsets=(), global_shape=()), "str is not a tensor; legal: a torch.Tensor"),
    ],
)
def test_what_is_no_plain_tensor_of_numbers_is_refused_by_name(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError) as refused:
        localize({"loss/0": 1.0, "grad/w": make()})
    assert str(refused.value) == f"outcome 'grad/w': {words}"


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        ({"w": [Shard(FULL.to_sparse(), (0, 0), (6, 4))]}, "outcome 'w': the layout is sparse_coo"),
        (
            {"w": SimpleNamespace(local=FULL, offsets=(0.0, 0), global_shape=(6, 4))},
            "outcome 'w': offsets=(0.0, 0) and global_shape=(6, 4) must be whole numbers; legal: offsets=(0, 0), ",
        ),
        ({"loss/0": 1.0, 0: FULL}, "outcome 0: a name must be text, not int; legal: 'loss/0'"),
        ({"grad/\ud800": FULL}, r"outcome 'grad/\ud800': a name must be text that a file can hold; legal: 'loss/0'"),
        ({"grad/w": ["no"]}, "outcome 'grad/w': str is not a value"),
        (
            {"state": {"w": FULL}},
            "outcome 'state': a dict is not a value; legal: each of its tensors under a name of its",
        ),
        (None, "a subject returned nothing (None); it must return a mapping of names to tensors; legal: return {"),
        ([FULL], "a subject returned list; it must return a mapping of names to tensors; legal: return {'loss/0': "),
    ],
)
def test_shards_and_names_that_are_none_are_refused_too(outcome: Any, words: str) -> None:
    with pytest.raises(ValueError) as refused:
        localize(outcome)
    assert str(refused.value).startswith(words)


def test_numbers_of_numpy_are_full_tensors() -> None:
    values: dict[str, Any] = {"hits/0": np.int64(3), "rate/0": np.float32(0.5), "right/0": np.array([[True, False]])}
    merged = merge_outcomes([localize(values), localize(values)])
    assert merged.flaws == () and all(value.tolist() == merged.tensors[name].tolist() for name, value in values.items())


@given(st.data())
def test_shards_of_any_extent_that_agree_where_they_overlap_merge_and_one_other_element_is_a_conflict(
    data: st.DataObject,
) -> None:
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple))
    full = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
    held, boxes = torch.zeros(shape, dtype=torch.int64), list[tuple[slice, ...]]()
    for _ in range(data.draw(st.integers(2, 5))):
        ends = [sorted(data.draw(st.sets(st.integers(0, size), min_size=2, max_size=2))) for size in shape]
        boxes.append(tuple(slice(a, b) for a, b in ends))
        held[boxes[-1]] += 1
    starts = [tuple(part.start for part in box) for box in boxes]
    outcomes = [{"w": Shard(full[box].clone(), at, shape)} for box, at in zip(boxes, starts, strict=True)]
    merged = merge_outcomes([localize(outcome) for outcome in outcomes])
    missing = (held == 0).nonzero().tolist()
    if not missing:
        assert merged.flaws == () and torch.equal(merged.tensors["w"], full)
    else:
        (flaw,) = merged.flaws
        first = f"first missing at {tuple(missing[0])}"
        assert (flaw.kind, flaw.message) == (
            "omission",
            f"{len(missing)} of {full.numel()} elements are held by no rank; {first}",
        )
    if several := (held > 1).nonzero().tolist():
        place = tuple(data.draw(st.sampled_from(several)))
        holders = [
            rank
            for rank, box in enumerate(boxes)
            if all(part.start <= i < part.stop for part, i in zip(box, place, strict=True))
        ]
        wrong = data.draw(st.sampled_from(holders))
        outcomes[wrong]["w"].local[tuple(i - at for i, at in zip(place, starts[wrong], strict=True))] += 0.5
        flaw, *gap = merge_outcomes([localize(outcome) for outcome in outcomes]).flaws
        assert [other.kind for other in gap] == ["omission"] * bool(missing)
        assert flaw.kind == "replica conflict" and flaw.ranks and {*flaw.ranks} <= {*holders}
        assert f"rank {wrong} " in flaw.message and " in 1 of " in flaw.message and "by up to 0.5" in flaw.message
