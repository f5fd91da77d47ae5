"""Unmodified expert-parallel Megatron-Core in process: GPTModel with two experts a rank computes what one rank does.

Its dispatcher exchanges tokens by all_to_all with split sizes that are numpy arrays on a GPU, and one tensor on a CPU.
"""

from __future__ import annotations

import re
import warnings
import zlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.engines.threads.inproc import InprocEngine
from harness.plain_case import Vocabulary
from harness.recording.recorder import Recorder
from harness.torch_internals.cuda_on_cpu import cuda_on_cpu

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Megatron's own, at import
    pytest.importorskip("megatron.core", reason="needs the extra `peers`")
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe import moe_utils

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]
EXPERTS, BATCH, SEQ = 4, 2, 16
STATE = ("megatron.core.parallel_state", "megatron.core.tensor_parallel.random")
CASES = Vocabulary.of({"ep": 1, "etp": 1})


@pytest.fixture(autouse=True)
def cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(moe_utils, "te_general_gemm", None, raising=False)  # a name that 0.16.1 forgets without TE
    with cuda_on_cpu():
        yield


def weight(name: str, like: Tensor) -> Tensor:
    """The value of a weight of the whole model, by its name."""
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode()))) * 0.2


def of_whole_model(name: str, ep: int) -> str:
    """The name in the whole model of an expert that this rank counts from 0."""
    first = parallel_state.get_expert_model_parallel_rank() * (EXPERTS // ep)
    return re.sub(r"(?<=local_experts\.)\d+", lambda found: str(first + int(found[0])), name)


def step(rank: int, ep: int) -> tuple[list[float], dict[str, Tensor]]:
    """Forward and backward of this rank's rows: the sum of their losses, and the gradients of its experts."""
    parallel_state.initialize_model_parallel(expert_model_parallel_size=ep, expert_tensor_parallel_size=1)
    model_parallel_cuda_manual_seed(0)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=torch.float32,
        num_moe_experts=EXPERTS,
        moe_router_topk=2,
        moe_aux_loss_coeff=0.0,
        moe_token_dispatcher_type="alltoall",
        add_bias_linear=False,
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False),
        vocab_size=128,
        max_sequence_length=SEQ,
        position_embedding_type="learned_absolute",
    )
    names = {of_whole_model(name, ep): parameter for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for name, parameter in names.items():
            parameter.copy_(weight(name, parameter))
    tokens = (torch.arange(BATCH * SEQ).view(BATCH, SEQ) * 7 % 128).chunk(ep)[rank]
    mask = torch.ones(1, 1, SEQ, SEQ).triu(1).bool()
    places = torch.arange(SEQ).expand_as(tokens)
    loss = model(tokens, places, attention_mask=mask, labels=tokens.roll(-1, 1)).sum()
    loss.backward()
    gradients = {
        name: found.grad for name, found in names.items() if "local_experts" in name and found.grad is not None
    }
    return [loss.item()], gradients


def test_two_ranks_with_half_of_the_experts_compute_what_one_rank_does() -> None:
    case = CASES.parse("dp=2 ep=2")
    with InprocEngine() as engine:
        (((whole,), expected),) = engine.run(step, 1, world_size=1, per_rank=STATE)
        with Recorder("", case.mode, 2, case.axes) as recorder:

            def recorded(rank: int, ep: int) -> Any:
                with recorder.on_rank(rank):
                    return step(rank, ep)

            ranks = engine.run(recorded, 2, world_size=2, per_rank=STATE, observer=recorder)
    assert abs(sum(loss for (loss,), _ in ranks) - whole) <= 1e-4 * abs(whole)
    assert len(expected) == 2 * EXPERTS * 2 and not ranks[0][1].keys() & ranks[1][1].keys()
    for name, gradient in {**ranks[0][1], **ranks[1][1]}.items():
        assert torch.allclose(gradient, expected[name], rtol=1e-3, atol=1e-4), name
    assert {(event.op, event.axis) for event in recorder.events()} >= {("all_to_all", "ep")}
    exchanges = Counter(event.phase for event in recorder.events() if (event.rank, event.op) == (0, "all_to_all"))
    assert exchanges == {"forward": 6, "backward": 6}  # a layer: tokens and their weights there, tokens back
