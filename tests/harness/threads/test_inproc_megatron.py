"""Unmodified Megatron-Core in the in-process engine: its GPTModel on several ranks computes what it does on one.

With tensor parallelism it issues 4L + 5 all_reduces. With expert parallelism its dispatcher exchanges tokens by
all_to_all. Split sizes are numpy arrays on a GPU, and one tensor on a CPU. Megatron is written for CUDA, whose
questions are answered for the CPU. Its groups and random streams, one set a process, are one set a rank.
"""

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
LAYERS, EXPERTS, BATCH, SEQ = 2, 4, 2, 16
STATE = ("megatron.core.parallel_state", "megatron.core.tensor_parallel.random")
CASES = Vocabulary.of({"ep": 1, "etp": 1})


@pytest.fixture(autouse=True)
def cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(moe_utils, "te_general_gemm", None, raising=False)  # a name that 0.16.1 forgets without TE
    with cuda_on_cpu():
        yield


def gpt(sizes: dict[str, int], config: dict[str, Any], spec: dict[str, Any]) -> Any:
    """This rank's GPTModel in a world of these sizes."""
    parallel_state.initialize_model_parallel(**sizes)
    model_parallel_cuda_manual_seed(0)
    made = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=32,
        num_attention_heads=4,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=torch.float32,
        **config,
    )
    return GPTModel(
        config=made,
        transformer_layer_spec=get_gpt_layer_local_spec(**spec),
        vocab_size=128,
        max_sequence_length=SEQ,
        position_embedding_type="learned_absolute",
    )


def losses(model: Any, part: int = 0, parts: int = 1) -> Tensor:
    """The losses of this part of the batch."""
    tokens = (torch.arange(BATCH * SEQ).view(BATCH, SEQ) * 7 % 128).chunk(parts)[part]
    mask = torch.ones(1, 1, SEQ, SEQ).triu(1).bool()
    found: Tensor = model(tokens, torch.arange(SEQ).expand_as(tokens), attention_mask=mask, labels=tokens.roll(-1, 1))
    return found


def step(rank: int, tp: int) -> tuple[float, Tensor, int]:
    """Run a forward and backward: loss, gradient of the replicated final norm, rank in the group."""
    model = gpt({"tensor_model_parallel_size": tp}, {}, {})
    loss = losses(model).mean()
    loss.backward()
    return loss.item(), model.decoder.final_layernorm.weight.grad, parallel_state.get_tensor_model_parallel_rank()


def recorded(program: Any, words: str, size: int) -> tuple[list[Any], Recorder]:
    """Results of the ranks, and the recorder of their calls."""
    case = CASES.parse(words)
    with InprocEngine() as engine, Recorder("", case.mode, case.world_size, case.axes) as recorder:

        def on_rank(rank: int) -> Any:
            with recorder.on_rank(rank):
                return program(rank, size)

        found = engine.run(on_rank, world_size=case.world_size, observer=recorder, per_rank=STATE)
    return found, recorder


def test_parallel_state_is_as_before_after_the_run_so_that_the_next_one_starts_clean(engine: InprocEngine) -> None:
    runs = []
    for _ in range(2):
        assert not parallel_state.model_parallel_is_initialized()
        runs.append(engine.run(step, 2, world_size=2, per_rank=STATE))
    assert not parallel_state.model_parallel_is_initialized()
    assert all(torch.equal(one[1], other[1]) and one[0] == other[0] for one, other in zip(*runs, strict=True))


MOE = {
    "num_moe_experts": EXPERTS,
    "moe_router_topk": 2,
    "moe_aux_loss_coeff": 0.0,
    "moe_token_dispatcher_type": "alltoall",
    "add_bias_linear": False,
}


def expert_step(rank: int, ep: int) -> tuple[float, dict[str, Tensor]]:
    """Forward and backward of this rank's rows: the sum of their losses, and the gradients of its experts.

    A weight follows from its name in the whole model, where a rank's experts are not counted from 0.
    """
    sizes = {"expert_model_parallel_size": ep, "expert_tensor_parallel_size": 1}
    model = gpt(sizes, MOE, {"num_experts": EXPERTS, "moe_grouped_gemm": False})
    first = parallel_state.get_expert_model_parallel_rank() * (EXPERTS // ep)
    named = {
        re.sub(r"(?<=local_experts\.)\d+", lambda found: str(first + int(found[0])), name): parameter
        for name, parameter in model.named_parameters()
    }
    with torch.no_grad():
        for name, parameter in named.items():
            drawn = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            parameter.copy_(torch.randn(parameter.shape, generator=drawn) * 0.2)
    loss = losses(model, rank, ep).sum()
    loss.backward()
    return loss.item(), {name: p.grad for name, p in named.items() if "local_experts" in name and p.grad is not None}


def test_two_ranks_with_half_of_the_experts_compute_what_one_rank_does() -> None:
    ((whole, expected),), _ = recorded(expert_step, "dp=1", 1)
    ranks, recorder = recorded(expert_step, "dp=2 ep=2", 2)
    assert abs(sum(loss for loss, _ in ranks) - whole) <= 1e-4 * abs(whole)
    assert len(expected) == LAYERS * EXPERTS * 2 and not ranks[0][1].keys() & ranks[1][1].keys()
    for name, gradient in {**ranks[0][1], **ranks[1][1]}.items():
        assert torch.allclose(gradient, expected[name], rtol=1e-3, atol=1e-4), name
    assert {(event.op, event.axis) for event in recorder.events()} >= {("all_to_all", "ep")}
    exchanges = Counter(event.phase for event in recorder.events() if (event.rank, event.op) == (0, "all_to_all"))
    assert exchanges == {"forward": 6, "backward": 6}  # a layer: tokens and their weights there, tokens back
