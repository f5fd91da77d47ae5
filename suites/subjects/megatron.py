"""Unmodified Megatron-Core as a subject: one step of GPTModel under tensor parallelism, and the same on one rank.

Megatron is written for CUDA, so CUDA's questions are answered for the CPU (`subject.session`). What it keeps for a
process, its groups and its random streams, must be one set a rank (`subject.per_rank`). Its cross entropy computes in
float32, whatever the model does, so cases are float32.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from harness.engines.threads.inproc import InprocEngine
from harness.running.truth.reference import Reference
from harness.shard import Shard
from reference.case import Case
from shardproof import cuda_on_cpu

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Megatron's own, at import
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

__all__ = ["REFERENCE", "control", "subject", "truth"]

STATE = ("megatron.core.parallel_state", "megatron.core.tensor_parallel.random")
REFERENCE = Reference(truth=f"{__name__}:truth", control=f"{__name__}:control")


def subject(case: Case, device: torch.device) -> dict[str, Tensor | Shard]:
    """One forward and backward: the loss, and every gradient as the shard that Megatron says it is."""
    return _step(case, case.tp, getattr(torch, case.dtype))


vars(subject).update(per_rank=STATE, session=cuda_on_cpu)


def truth(case: Case, device: torch.device) -> dict[str, Tensor]:
    """The same on one rank, in float64 as far as Megatron's cross entropy lets it."""
    return _on_one_rank(case, torch.float64)


def control(case: Case, device: torch.device, *, parts: int = 0) -> dict[str, Tensor]:
    """The same on one rank in the case's dtype."""
    return _on_one_rank(case, getattr(torch, case.dtype))


def _on_one_rank(case: Case, dtype: torch.dtype) -> dict[str, Tensor]:
    with InprocEngine() as alone, cuda_on_cpu():
        (outcome,) = alone.run(lambda rank: _step(case, 1, dtype), world_size=1, seed=case.seed, per_rank=STATE)
    return {name: value.local if isinstance(value, Shard) else value for name, value in outcome.items()}


def _step(case: Case, tp: int, dtype: torch.dtype) -> dict[str, Tensor | Shard]:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    model_parallel_cuda_manual_seed(case.seed)
    model = _model(case, dtype)
    tokens = torch.arange(case.batch * case.seq).view(case.batch, case.seq) * 7 % case.vocab
    places = torch.arange(case.seq).expand(case.batch, case.seq)
    mask = torch.ones(1, 1, case.seq, case.seq).triu(1).bool()
    loss = model(tokens, places, attention_mask=mask, labels=tokens.roll(-1, 1)).mean()
    loss.backward()
    outcome: dict[str, Tensor | Shard] = {"loss/0": loss.detach()}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            outcome[f"grad/{name}"] = _placed(parameter, parameter.grad, tp)
    return outcome


def _model(case: Case, dtype: torch.dtype) -> torch.nn.Module:
    config = TransformerConfig(
        num_layers=case.layers,
        hidden_size=case.hidden,
        num_attention_heads=case.heads,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=dtype,
    )
    model: torch.nn.Module = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=case.vocab,
        max_sequence_length=case.seq,
        position_embedding_type="learned_absolute",
    )
    return model.to(dtype)


def _placed(parameter: torch.nn.Parameter, gradient: Tensor, tp: int) -> Tensor | Shard:
    """The gradient, as the shard along the dim that Megatron has marked."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return gradient
    dim, shape = int(getattr(parameter, "partition_dim")), list(gradient.shape)  # noqa: B009  (Megatron's mark)
    offsets = [0] * len(shape)
    offsets[dim] = parallel_state.get_tensor_model_parallel_rank() * shape[dim]
    shape[dim] *= tp
    return Shard(gradient, tuple(offsets), tuple(shape))
