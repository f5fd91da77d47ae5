"""Buckets of flat buffers, shards of rows and loss scales: laws over drawn layouts, and Megatron-Core's own."""

import importlib
from collections.abc import Iterable
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from shardproof import cuda_on_cpu
from shardproof.parallel.data_parallel.buckets import make_buckets, shares_of_rank
from shardproof.parallel.data_parallel.fsdp import UnitLayout
from shardproof.parallel.model.loss_scale import DynamicScale
from shardproof.reference.case import Case
from shardproof.reference.training.scaling import LossScale
from tests.parallel.ranks import group


class Layout(NamedTuple):
    """Parameters of a buffer's layout."""

    sizes: dict[str, int]
    ranks: int
    sharded: bool
    largest: int
    apart: frozenset[str]


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any: up to nine parameters of unequal sizes, buckets from smaller than one of them to larger than all."""
    sizes = draw(st.lists(st.integers(1, 1500), min_size=1, max_size=9))
    named = {f"p{number}": size for number, size in enumerate(sizes)}
    return Layout(
        sizes=named,
        ranks=draw(st.sampled_from([1, 2, 3, 5, 7, 8])),
        sharded=draw(st.booleans()),
        largest=draw(st.sampled_from([0, 1, 64, 700, 2000, 20_000])),
        apart=frozenset(draw(st.sets(st.sampled_from(list(named)), max_size=2))),
    )


def theirs(layout: Layout, parameters: dict[str, nn.Parameter], rank: int) -> Any:
    """Megatron's buffer of these parameters as one rank makes it, on the CPU."""
    distributed = importlib.import_module("megatron.core.distributed")
    made = distributed.param_and_grad_buffer
    with patch.object(made, "log_on_each_pipeline_stage"), patch.object(torch.cuda, "current_device", lambda: "cpu"):
        return made._ParamAndGradBuffer(
            distributed.DistributedDataParallelConfig(use_distributed_optimizer=layout.sharded),
            torch.float32,
            torch.float32,
            [*parameters.values()],
            group(layout.ranks, rank),
            layout.largest or None,
            {parameter: name for name, parameter in parameters.items()},
            1.0,
            [*range(len(parameters))],
            False,
            SimpleNamespace(tp=group(), dp_cp=group(layout.ranks, rank)),
        )


@pytest.fixture
def megatron() -> None:
    pytest.importorskip("megatron.core", reason="needs the extra `peers`")


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("megatron")
@settings(max_examples=50, database=None, derandomize=True, phases=[Phase.generate])
@given(layouts())
def test_buckets_and_ranges_of_every_rank_are_megatrons(layout: Layout) -> None:
    """By the classes of the installed Megatron-Core."""
    optimizer = importlib.import_module("megatron.core.optimizer.distrib_optimizer").DistributedOptimizer
    ours = make_buckets(**layout._asdict())
    for rank in range(layout.ranks if layout.sharded else 1):
        parameters = {name: nn.Parameter(torch.zeros(size)) for name, size in layout.sizes.items()}
        for name in layout.apart:
            parameters[name].shared_embedding = True  # type: ignore[attr-defined]
        names = {parameter: name for name, parameter in parameters.items()}
        buffer = theirs(layout, parameters, rank)
        assert [bucket.offset for bucket in buffer.buckets] == [bucket.start for bucket in ours]
        assert [bucket.grad_data.numel() for bucket in buffer.buckets] == [bucket.size for bucket in ours]
        assert {names[p]: (start, end) for p, (start, end, _) in buffer.param_index_map.items()} == {
            slot.name: (slot.start, slot.end) for bucket in ours for slot in bucket.slots
        }
        for number, bucket in enumerate(ours if layout.sharded else ()):
            owned = optimizer._build_model_gbuf_range(buffer, number)["param_map"]
            assert {
                share.name: (share.first, share.last, share.at) for share in shares_of_rank(bucket, rank, layout.ranks)
            } == {names[p]: (at["param"].start, at["param"].end, at["gbuf_local"].start) for p, at in owned.items()}


@given(
    st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=3).map(tuple), min_size=1, max_size=4), st.integers(1, 9)
)
def test_a_unit_holds_every_padded_shard_end_to_end(shapes: list[tuple[int, ...]], ranks: int) -> None:
    """Padded to the largest chunk of torch."""
    unit = UnitLayout(shapes={str(number): shape for number, shape in enumerate(shapes)}, ranks=ranks)
    places = [*unit.places()]
    assert [first for _, first, _ in places] == [sum(size for _, _, size in places[:n]) for n in range(len(places))]
    assert sum(size for _, _, size in places) * ranks == unit.elements
    for name, _, size in places:
        assert size == torch.empty(unit.shapes[name]).chunk(ranks)[0].numel()


def scales(rule: DynamicScale, steps: Iterable[bool]) -> tuple[float, ...]:
    """The scale of every step and of the one after the last, from whether each was infinite."""
    states = accumulate(steps, lambda state, infinite: rule.after(state, infinite=infinite), initial=rule.start())
    return tuple(state.value for state in states)


def test_the_log_of_the_seed() -> None:
    """20 of 200 steps are skipped from 2**32 on: the first only uses up patience, 19 halve, and the log says 8192."""
    assert scales(DynamicScale(), [True] * 20 + [False] * 180)[-1] == 8192.0
    dense = LossScale.of(Case.parse("dtype=float16 master=float32 scaler=dynamic"))
    for step in range(200):
        dense.update(skipped=step < 20)
    assert dense.value == 8192.0


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("megatron")
@given(st.lists(st.booleans(), max_size=40), st.integers(1, 4), st.integers(1, 3))
def test_megatrons_own_scaler_agrees(steps: list[bool], interval: int, hysteresis: int) -> None:
    theirs = importlib.import_module("megatron.core.optimizer.grad_scaler")
    rule = DynamicScale(first=2.0**4, least=2.0, interval=interval, hysteresis=hysteresis)
    with cuda_on_cpu():
        scaler = theirs.DynamicGradScaler(
            initial_scale=rule.first,
            min_scale=rule.least,
            growth_factor=rule.growth_factor,
            backoff_factor=rule.backoff_factor,
            growth_interval=interval,
            hysteresis=hysteresis,
        )
    found = [scaler.scale.item()]
    for infinite in steps:
        scaler.update(infinite)
        found.append(scaler.scale.item())
    assert scales(rule, steps) == tuple(found)
