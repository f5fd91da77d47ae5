"""Groups, pipelines and stages equal those of the installed Megatron-Core."""

import importlib
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from reference.groups import PipelineGroup, RankOrder

REASON = "megatron-core (extra `peers`) is not installed"
state = pytest.importorskip("megatron.core.parallel_state", reason=REASON, exc_type=ImportError)
pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]
DENSE, EXPERT = ("tp", "cp", "dp", "pp"), ("tp", "ep", "dp", "pp")


@st.composite
def meshes(draw: st.DrawFn) -> tuple[str, dict[str, int], dict[str, int]]:
    """Any order of axes, pairwise different dense sizes, and expert sizes that divide."""
    tp, cp, dp, pp = draw(st.permutations((1, 2, 3, 4)))
    stage = tp * cp * dp
    etp = draw(st.sampled_from([part for part in range(1, stage + 1) if stage % part == 0]))
    ep = draw(st.sampled_from([part for part in range(1, stage + 1) if stage // etp % part == 0]))
    order = "-".join(draw(st.permutations(("tp", "cp", "ep", "dp", "pp"))))
    dense = {"tp": tp, "cp": cp, "ep": 1, "dp": dp, "pp": pp}
    return order, dense, {"tp": etp, "cp": 1, "ep": ep, "dp": stage // etp // ep, "pp": pp}


@settings(max_examples=60, deadline=None, database=None, derandomize=True, phases=[Phase.generate])
@given(meshes(), st.sets(st.sampled_from(DENSE), min_size=2), st.sets(st.sampled_from(EXPERT), min_size=2))
def test_the_groups_of_both_generators(
    mesh: tuple[str, dict[str, int], dict[str, int]], some: set[str], some_of_experts: set[str]
) -> None:
    order, *both = mesh
    for sizes, axes, joined in zip(both, (DENSE, EXPERT), (some, some_of_experts), strict=True):
        ours, theirs = RankOrder.of(order, sizes), state.RankGenerator(**sizes, order=order)
        for words in [*axes, "-".join(joined)]:
            assert [[*group] for group in ours.groups(words)] == theirs.get_ranks(words)


@settings(max_examples=30, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
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
