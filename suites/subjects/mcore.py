"""Unmodified Megatron-Core: GPTModel in its DistributedDataParallel over tp and dp, compared with itself on one rank.
With dropout that rank draws nothing: it drops what the ranks dropped, whose masks shardproof records.

shardproof run "tp=2 dp=2 sp=true llama=true" --subject shardproof.suites.subjects.mcore:subject
"""

import warnings

import torch

from shardproof.suites.subjects.mcore_training import add_statements, start, train, wrap_model

with warnings.catch_warnings(action="ignore"):  # Megatron's own, at import
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.transformer import TransformerConfig

LLAMA = {"normalization": "RMSNorm", "gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
LLAMA |= {"num_query_groups": 2, "add_bias_linear": False}
AGAIN: dict[str, dict[str, object]] = {"none": {}, "selective": {"recompute_granularity": "selective"}}
AGAIN["full"] = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def build(case):
    words = start(case) | (LLAMA if case.llama else {}) | AGAIN[case.recompute]
    config = TransformerConfig(**words | dict.fromkeys(("attention_dropout", "hidden_dropout"), case.dropout))
    places = "rope" if case.llama else "learned_absolute"
    return wrap_model(case, config, specs.get_gpt_layer_local_spec(), position_embedding_type=places)


def subject(case, device):
    return train(case, build(case))


add_statements(subject, sp=False, llama=False, dropout=0.0, recompute=tuple(AGAIN))
subject.cases = ("tp=2", "tp=2 dp=2 sp=true", "tp=2 llama=true", "tp=2 sp=true llama=true")
