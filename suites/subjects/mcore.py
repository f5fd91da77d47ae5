"""Unmodified Megatron-Core: GPTModel in its DistributedDataParallel over tp and dp, compared with itself on one rank.

shardproof run "tp=2 dp=2 sp=true llama=true" --subject suites.subjects.mcore:subject
"""

import warnings

import torch

from suites.subjects.mcore_training import start, stated, train, wrapped

with warnings.catch_warnings(action="ignore"):  # Megatron's own, at import
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.transformer import TransformerConfig

LLAMA = {"normalization": "RMSNorm", "gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
LLAMA |= {"num_query_groups": 2, "add_bias_linear": False}


def build(case):
    config = TransformerConfig(**{**start(case), **(LLAMA if case.llama else {})})
    places = "rope" if case.llama else "learned_absolute"
    return wrapped(case, config, specs.get_gpt_layer_local_spec(), position_embedding_type=places)


def subject(case, device):
    return train(case, build(case))


stated(subject, sp=False, llama=False)
subject.cases = ("tp=2", "tp=2 dp=2 sp=true", "tp=2 llama=true", "tp=2 sp=true llama=true")
