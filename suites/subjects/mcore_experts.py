"""Experts of unmodified Megatron-Core: its router, both token dispatchers and SequentialMLP, over tp, dp, ep and etp.

shardproof run "tp=2 dp=2 ep=2 etp=2 sp=true" --subject shardproof.suites.subjects.mcore_experts:subject
"""

import warnings

import torch

from shardproof.suites.subjects.mcore_training import add_statements, start, train, wrap_model

with warnings.catch_warnings(action="ignore"):  # Megatron's own, at import
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe import moe_utils

moe_utils.te_general_gemm = None  # without TransformerEngine the name is missing, and the router looks for it


def subject(case, device):
    words = start(case, expert_model_parallel_size=case.ep, expert_tensor_parallel_size=case.etp)
    words |= {"num_moe_experts": 4, "moe_router_topk": 2, "moe_token_dispatcher_type": case.dispatcher}
    words |= {"moe_router_load_balancing_type": case.balance, "moe_aux_loss_coeff": 0.1}
    words |= {"moe_z_loss_coeff": 0.1 if case.z_loss else None, "calculate_per_token_loss": case.per_token}
    words |= {"moe_router_score_function": case.score, "add_bias_linear": False, "moe_ffn_hidden_size": 40}
    scale = 1.0 if case.per_token else 1 / case.micro  # the share of the losses that a router adds itself
    moe_utils.MoEAuxLossAutoScaler.set_loss_scale(torch.tensor([scale]))
    model = wrap_model(case, TransformerConfig(**words), specs.get_gpt_layer_local_spec(num_experts=4))
    model.train(case.sp or case.tp == 1)  # else Megatron refuses to train; there is no dropout
    return train(case, model)


balance = ("none", "aux_loss", "seq_aux_loss", "global_aux_loss")
add_statements(
    subject, ep=1, etp=1, sp=True, dispatcher=("alltoall", "allgather"), score=("softmax", "sigmoid"), balance=balance
)
subject.words |= {"z_loss": False, "per_token": False}
subject.cases = ("dp=2 ep=2", "tp=2 ep=2", "tp=2 dp=2 ep=2 etp=2", "tp=2 dp=2 ep=2 etp=2 dispatcher=allgather")
