"""Buckets and owned ranges equal those of the installed Megatron-Core's own classes, on 200 drawn layouts."""

import warnings
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import Phase, given, settings
from torch import nn

from parallel.data_parallel.buckets import bucketed, shares
from tests.parallel.data_parallel.test_buckets import Layout, layouts

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Megatron's own, at import
    pytest.importorskip("megatron.core", reason="needs the extra `peers`")
    from megatron.core.distributed import DistributedDataParallelConfig, param_and_grad_buffer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]


def group(ranks: int, rank: int) -> Any:
    return SimpleNamespace(size=lambda: ranks, rank=lambda: rank)


def theirs(layout: Layout, parameters: dict[str, nn.Parameter], rank: int) -> Any:
    """Megatron's buffer of these parameters as one rank makes it, on the CPU."""
    with (
        patch.object(param_and_grad_buffer, "log_on_each_pipeline_stage"),
        patch.object(param_and_grad_buffer.torch.cuda, "current_device", lambda: "cpu"),
    ):
        return param_and_grad_buffer._ParamAndGradBuffer(
            DistributedDataParallelConfig(use_distributed_optimizer=layout.sharded),
            torch.float32,
            torch.float32,
            [*parameters.values()],
            group(layout.ranks, rank),
            layout.largest or None,
            {parameter: name for name, parameter in parameters.items()},
            1.0,
            [*range(len(parameters))],
            False,
            SimpleNamespace(tp=group(1, 0), dp_cp=group(layout.ranks, rank)),
        )


@settings(max_examples=100, deadline=None, database=None, derandomize=True, phases=[Phase.generate])
@given(layouts())
def test_the_buckets_and_the_ranges_of_every_rank(layout: Layout) -> None:
    ours = bucketed(**layout._asdict())
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
            owned = DistributedOptimizer._build_model_gbuf_range(buffer, number)["param_map"]
            assert {
                share.name: (share.first, share.last, share.at) for share in shares(bucket, rank, layout.ranks)
            } == {names[p]: (at["param"].start, at["param"].end, at["gbuf_local"].start) for p, at in owned.items()}
