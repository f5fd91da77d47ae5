"""Unmodified Megatron-Core in the in-process engine: at TP 2 and 4 GPTModel equals TP 1, with 4L + 5 all_reduces.

Megatron is written for CUDA, whose questions are answered for the CPU; its groups and random streams, one set a
process, are one set a rank.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from harness.engines.threads.inproc import InprocEngine
from harness.errors import RankRaised
from harness.ledger import Call
from harness.torch_internals.cuda_on_cpu import cuda_on_cpu

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Megatron's own, at import
    pytest.importorskip("megatron.core", reason="needs the extra `peers`")
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]
LAYERS = 2
STATE = ("megatron.core.parallel_state", "megatron.core.tensor_parallel.random")


class Counts:
    """How often each rank issued what."""

    def __init__(self) -> None:
        self.of: dict[int, Counter[str]] = {}

    def issued(self, rank: int, call: Call) -> int:
        """Count it."""
        self.of.setdefault(rank, Counter())[call.op] += 1
        return 0

    def completed(self, rank: int, ticket: int) -> None:
        """Nothing to count."""


@pytest.fixture(autouse=True)
def cpu() -> Iterator[None]:
    with cuda_on_cpu():
        yield


def step(rank: int, tp: int) -> tuple[float, Tensor, int]:
    """One forward and backward of GPTModel: loss, gradient of the replicated final norm, rank in the group."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    model_parallel_cuda_manual_seed(0)
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=32,
        num_attention_heads=4,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=torch.float32,
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=128,
        max_sequence_length=16,
        position_embedding_type="learned_absolute",
    )
    tokens = torch.arange(32).view(2, 16) * 7 % 128
    places = torch.arange(16).expand(2, 16)
    mask = torch.ones(1, 1, 16, 16).triu(1).bool()
    loss = model(tokens, places, attention_mask=mask, labels=tokens.roll(-1, 1)).mean()
    loss.backward()
    return loss.item(), model.decoder.final_layernorm.weight.grad, parallel_state.get_tensor_model_parallel_rank()


def run(tp: int, counts: Counts | None = None) -> list[Any]:
    with InprocEngine() as engine:
        return engine.run(step, tp, world_size=tp, observer=counts, per_rank=STATE)


@pytest.mark.parametrize("tp", [2, 4])
def test_gpt_model_equals_one_rank_and_issues_the_calls_of_its_closed_form(tp: int) -> None:
    ((loss, gradient, _),) = run(1)
    counts = Counts()
    ranks = run(tp, counts)
    assert [place for _, _, place in ranks] == list(range(tp))
    for found, norm_gradient, _ in ranks:
        assert abs(found - loss) <= 1e-6
        assert (norm_gradient - gradient).abs().max() <= 1e-6
    assert [counts.of[rank] for rank in range(tp)] == [Counter(all_reduce=4 * LAYERS + 5)] * tp


def test_parallel_state_is_as_before_after_the_run_so_that_the_next_one_starts_clean() -> None:
    assert not parallel_state.model_parallel_is_initialized()
    first = run(2)
    assert not parallel_state.model_parallel_is_initialized()
    second = run(2)
    assert all(torch.equal(one[1], other[1]) and one[0] == other[0] for one, other in zip(first, second, strict=True))


def test_without_the_listing_ranks_share_the_globals_and_the_second_one_fails() -> None:
    before = dict(vars(parallel_state))
    try:
        with InprocEngine() as engine, pytest.raises(RankRaised, match="is already initialized"):
            engine.run(lambda rank: (dist.barrier(), step(rank, 2)), world_size=2)
    finally:
        vars(parallel_state).update(before)
