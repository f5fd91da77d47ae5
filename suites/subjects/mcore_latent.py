"""Multi-head latent attention of unmodified Megatron-Core, over tp and dp, compared with itself on one rank.

shardproof run "tp=2 sp=true down=duplicated" --subject shardproof.suites.subjects.mcore_latent:subject

Its down projections are whole on every rank, as TransformerEngine's spec has them, or split, as the local spec does.
"""

import warnings

import torch

from shardproof.suites.subjects.mcore_training import LocalNorm, add_statements, start, train, wrap_model

with warnings.catch_warnings(action="ignore"):  # Megatron's own, at import
    from megatron.core import parallel_state
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.post_training.modelopt.layers import Linear
    from megatron.core.transformer import MLATransformerConfig, multi_latent_attention
    from megatron.core.transformer.dot_product_attention import DotProductAttention

multi_latent_attention.HAVE_TE = False  # 0.16.1 has True without TransformerEngine, whose classes are None
multi_latent_attention.Linear = Linear  # in 0.19.2 None without TransformerEngine, which it does not need


class LatentCore(DotProductAttention):
    """Megatron's own without TransformerEngine, which is not given the widths of keys and values."""

    def __init__(self, *args, k_channels=None, v_channels=None, **words):
        super().__init__(*args, **words)


def sum_key(projection, given, returned):  # what 0.16.1 lacks: all heads share this key, and a rank has a part of them
    def over_tp(gradient):
        total = gradient.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(total, group=parallel_state.get_tensor_model_parallel_group())
        return total

    latent, key = returned[0].split([16, 4], -1)
    key.register_hook(over_tp)
    return torch.cat([latent, key], -1), returned[1]


def subject(case, device):
    words = start(case) | {"q_lora_rank": 16 if case.q_lora else None, "kv_lora_rank": 16, "rope_type": "rope"}
    words |= {"qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 8, "kv_channels": 8}
    config = MLATransformerConfig(**words, qk_layernorm=case.qk_norm)
    layer = specs.get_gpt_layer_local_spec(multi_latent_attention=True, qk_layernorm=case.qk_norm)
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = LatentCore
    if case.qk_norm:
        attention.q_layernorm = attention.kv_layernorm = LocalNorm
    if case.down == "duplicated":
        attention.linear_q_down_proj = attention.linear_kv_down_proj = Linear
    model = wrap_model(case, config, layer, position_embedding_type="rope")
    for block in model.module.decoder.layers if case.summed_key and case.tp > 1 else ():
        block.self_attention.linear_kv_down_proj.register_forward_hook(sum_key)
    return train(case, model)


add_statements(subject, sp=False, down=("duplicated", "column"), q_lora=True, qk_norm=False, summed_key=False)
duplicated = "tp=2 down=duplicated"
subject.cases = (f"{duplicated} sp=true", f"{duplicated} dp=2 sp=true qk_norm=true", f"{duplicated} summed_key=true")
