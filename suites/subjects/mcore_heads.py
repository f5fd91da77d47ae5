"""Multi-token prediction of unmodified Megatron-Core over tp and dp, compared with a dense model in plain torch.

shardproof run "tp=2 dp=2 sp=true heads=2" --subject shardproof.suites.subjects.mcore_heads:subject
"""

import warnings

import torch
from torch.nn import functional

from shardproof.suites.subjects.mcore_training import (
    LocalNorm,
    add_statements,
    draw_weight,
    micro_batch,
    start,
    train,
    wrap_model,
)

with warnings.catch_warnings(action="ignore"):  # Megatron's own, at import
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.transformer import TransformerConfig, multi_token_prediction

LAYER = {"input_layernorm": (24,), "self_attention.linear_proj": (24, 24), "self_attention.linear_qkv": (72, 24)}
LAYER |= {"pre_mlp_layernorm": (24,), "mlp.linear_fc1": (40, 24), "mlp.linear_fc2": (24, 40)}
SHARE = 0.1  # the share of the heads' losses in the trained loss
NAMES = multi_token_prediction.MultiTokenPredictionLayerSubmodules.__dataclass_fields__
INSIDE = "mtp_model_layer" if "mtp_model_layer" in NAMES else "transformer_layer"  # in 0.19.2 and in 0.16.1


def dense(case):  # its parameters, under Megatron's names
    layers = {f"decoder.layers.{number}": LAYER for number in range(2)}
    layers |= {f"mtp.layers.{number}.{INSIDE}": LAYER for number in range(case.heads)}
    shapes = {f"{layer}.{name}": shape for layer, inside in layers.items() for name, shape in inside.items()}
    norms = ["enorm", "hnorm", "final_layernorm"]
    shapes |= {f"mtp.layers.{number}.{name}": (24,) for number in range(case.heads) for name in norms}
    shapes |= {"decoder.final_layernorm": (24,)}
    shapes = {f"{name}.bias": shape[:1] for name, shape in shapes.items()} | {
        f"{name}.weight": shape for name, shape in shapes.items()
    }
    shapes |= {f"mtp.layers.{number}.eh_proj.weight": (24, 48) for number in range(case.heads)}
    shapes |= {"embedding.word_embeddings.weight": (96, 24), "embedding.position_embeddings.weight": (12, 24)}
    shapes |= {"output_layer.weight": (96, 24)}
    return {name: draw_weight(case, name, shape).requires_grad_() for name, shape in shapes.items()}


def losses(case, w, tokens):  # of the next tokens, and of those that each head predicts
    def norm(x, name):
        return functional.layer_norm(x, (24,), w[f"{name}.weight"], w[f"{name}.bias"])

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def block(x, name):
        qkv = linear(norm(x, f"{name}.input_layernorm"), f"{name}.self_attention.linear_qkv").unflatten(-1, (4, 18))
        heads = functional.scaled_dot_product_attention(*qkv.transpose(1, 2).split(6, -1), is_causal=True)
        x = x + linear(heads.transpose(1, 2).flatten(2), f"{name}.self_attention.linear_proj")
        inner = functional.gelu(linear(norm(x, f"{name}.pre_mlp_layernorm"), f"{name}.mlp.linear_fc1"))
        return x + linear(inner, f"{name}.mlp.linear_fc2")

    def embed_tokens(ids, places):
        return w["embedding.word_embeddings.weight"][ids] + w["embedding.position_embeddings.weight"][places]

    def loss(x, labels):
        logits = x @ w["output_layer.weight"].T
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    ids, labels, places = tokens[:, :-1], tokens[:, 1:], torch.arange(12).expand(2, 12)
    x = embed_tokens(ids, places)
    for number in range(2):
        x = block(x, f"decoder.layers.{number}")
    x = norm(x, "decoder.final_layernorm")
    yield loss(x, labels)
    for number in range(case.heads):
        ids, labels, places = (functional.pad(one[:, 1:], (0, 1)) for one in (ids, labels, places))
        name, kept = f"mtp.layers.{number}", 11 - number  # the last places have no token that far ahead
        both = [norm(embed_tokens(ids, places), f"{name}.enorm"), norm(x, f"{name}.hnorm")]
        x = block(torch.cat(both, -1) @ w[f"{name}.eh_proj.weight"].T, f"{name}.{INSIDE}")
        x = norm(x, f"{name}.final_layernorm")
        yield SHARE / case.heads * loss(x[:, :kept], labels[:, :kept])


def truth(case, device):
    w, outcome, parts = dense(case), {}, case.micro * case.dp
    optimizer = torch.optim.SGD(w.values(), lr=0.1)
    for step in range(case.steps):
        optimizer.zero_grad()
        outcome[f"loss/{step}"] = torch.zeros((), dtype=w["output_layer.weight"].dtype)
        for micro, dp_rank in ((micro, dp_rank) for micro in range(case.micro) for dp_rank in range(case.dp)):
            first, *others = losses(case, w, micro_batch(case, step, micro, dp_rank))
            ((first + sum(others)) / parts).backward()
            outcome[f"loss/{step}"] += first.detach() / parts
        outcome |= {f"grad/{name}": weight.grad.clone() for name, weight in w.items() if step == 0}
        optimizer.step()
    return outcome | {f"param/{name}": weight.detach() for name, weight in w.items()}


def subject(case, device):
    words = start(case) | {"mtp_num_layers": case.heads, "mtp_loss_scaling_factor": SHARE}
    config = TransformerConfig(**words, calculate_per_token_loss=case.per_token)
    multi_token_prediction.MTPLossAutoScaler.set_loss_scale(torch.tensor([1.0 if case.per_token else 1 / case.micro]))
    layer = specs.get_gpt_layer_local_spec()
    heads = specs.get_gpt_mtp_block_spec(config, layer, use_transformer_engine=False)
    inside = heads.layer_specs[0].submodules
    inside.enorm = inside.hnorm = inside.layer_norm = LocalNorm
    return train(case, wrap_model(case, config, layer, mtp_block_spec=heads))


add_statements(subject, sp=False, heads=1, per_token=False)
subject.truth, subject.cases = truth, ("tp=2 heads=2", "tp=2 dp=2 sp=true")
