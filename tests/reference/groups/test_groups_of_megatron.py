"""Groups, pipelines and stages equal those of the installed Megatron-Core."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from reference.errors import CaseError
from reference.groups import PipelineGroup
from tests.reference.groups import systems
from tests.reference.groups.layouts import requests
from tests.reference.groups.systems import hybrid, levels, megatron

REASON = "megatron-core (extra `peers`) is not installed"
state = pytest.importorskip("megatron.core.parallel_state", reason=REASON, exc_type=ImportError)
pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]
DENSE, EXPERT = ("tp", "cp", "dp", "pp"), ("tp", "ep", "dp", "pp")
OURS = {"tp": "etp", "dp": "edp"}


@settings(max_examples=220, deadline=None, database=None, derandomize=True, phases=[Phase.generate])
@given(requests(), st.sets(st.sampled_from(DENSE), min_size=2), st.sets(st.sampled_from(EXPERT), min_size=2))
def test_the_groups_of_both_generators(request: dict[str, Any], some: set[str], some_of_experts: set[str]) -> None:
    with patch.object(systems, "_check_pipelines"):  # RankGenerator itself takes any order
        layout = megatron(**request)
    sizes, pp, order = layout.sizes, request["pp"], request["order"]
    dense = state.RankGenerator(tp=sizes["tp"], ep=1, dp=sizes["dp"], pp=pp, cp=sizes["cp"], order=order)
    expert = state.RankGenerator(tp=sizes["etp"], ep=sizes["ep"], dp=sizes["edp"], pp=pp, cp=1, order=order)
    for words in [*DENSE, "-".join(some)]:
        assert [[*group] for group in layout.orders[0].groups(words)] == dense.get_ranks(words)
    for words in [*EXPERT, "-".join(some_of_experts)]:
        ours = layout.orders[1].groups("-".join(OURS.get(word, word) for word in words.split("-")))
        assert [[*group] for group in ours] == expert.get_ranks(words)


class Accepted(Exception):
    """Megatron makes its first group: all that it refuses was refused before."""


def accepted(request: dict[str, Any]) -> bool:
    world = patch.multiple(
        torch.distributed, is_initialized=lambda: True, get_world_size=lambda: request["world"], get_rank=lambda: 0
    )
    with (
        world,
        patch.object(state, "_DATA_PARALLEL_GROUP", None),
        patch.object(state, "create_group", side_effect=Accepted),
    ):
        try:
            state.initialize_model_parallel(
                tensor_model_parallel_size=request["tp"],
                pipeline_model_parallel_size=request["pp"],
                context_parallel_size=request["cp"],
                expert_model_parallel_size=request["ep"],
                expert_tensor_parallel_size=request["etp"],
                order=request["order"],
            )
        except (AssertionError, RuntimeError):
            return False
        except Accepted:
            return True
    raise AssertionError("no group was made")


@settings(max_examples=200, deadline=None, database=None, derandomize=True, phases=[Phase.generate])
@given(requests(), st.integers(0, 1))
def test_the_same_requests_are_refused(request: dict[str, Any], more: int) -> None:
    request["world"] += more
    try:
        ours = bool(megatron(**request))
    except CaseError:
        ours = False
    assert ours == accepted(request)


def made(builder: str, ranks: list[int], *arguments: Any) -> list[tuple[int, ...]]:
    """The rank lists for which a function of Megatron makes groups, in its order."""
    with patch.object(state, "create_group", side_effect=lambda ranks, **_: tuple(ranks)) as create:
        getattr(state, builder)(-1, ranks, *arguments)
    return [tuple(call.args[0]) for call in create.call_args_list]


def test_a_group_cut_into_levels_and_blocks() -> None:
    ranks = [*range(1, 49, 2)]
    for sizes in ([2, 3, 4], [4, 6], [24], [3, 1, 8]):
        ours = {group for groups in levels(ranks, sizes) for group in groups}
        assert ours == {*made("create_hierarchical_groups", ranks, sizes)}
    ours = {group for groups in hybrid(ranks).values() for group in groups}
    assert ours == {*made("create_hybrid_dp_cp_groups", ranks, None)}


@settings(max_examples=60, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_the_first_layer_of_each_chunk(data: st.DataObject) -> None:
    offset = importlib.import_module("megatron.core.transformer.transformer_layer").get_transformer_layer_offset
    stages, chunks, middle = (data.draw(st.integers(low, high)) for low, high in ((2, 5), (1, 3), (1, 3)))
    first, last = (data.draw(st.none() | st.integers(1, 3).map(lambda n: n * chunks)) for _ in range(2))
    pipeline = PipelineGroup(ranks=tuple(range(stages)), chunks=chunks)
    others = stages - (first is not None) - (last is not None)
    count = (first or 0) + (last or 0) + others * chunks * middle
    assume(others or chunks == 1)  # there 0.16.1 divides by zero
    config = SimpleNamespace(
        pipeline_model_parallel_size=stages,
        pipeline_model_parallel_layout=None,
        num_layers=count,
        num_layers_in_first_pipeline_stage=first,
        num_layers_in_last_pipeline_stage=last,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        account_for_embedding_in_pipeline_split=False,
        account_for_loss_in_pipeline_split=False,
    )
    for rank in pipeline.ranks:
        for chunk in range(chunks):
            theirs = offset(config, vp_stage=chunk if chunks > 1 else None, pp_rank=rank)
            assert pipeline.layers(count, rank, chunk, first=first, last=last).start == theirs


def test_who_holds_the_embeddings() -> None:
    for ranks in ((3,), (0, 4, 8, 12)):
        pipeline = PipelineGroup(ranks=ranks)
        assert [*pipeline.embedding_ranks()] == state.default_embedding_ranks([*ranks])
        assert [*pipeline.position_embedding_ranks()] == state.default_position_embedding_ranks([*ranks])
