"""A Hugging Face model split by the library's own plans over tp, dp (FSDP2) and ep, compared with it in one process.

shardproof calls `subject` on every rank, and `truth` once in float64. They are compared name by name. transformers 5.
"""

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, initialization
from transformers.distributed import DistributedConfig


def dense(case):  # the whole model; its weights follow from the seed alone, so they are the same everywhere
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 96, "head_dim": 4}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 4, "attention_dropout": 0.0}
    sizes |= {"tie_word_embeddings": case.tied, "pad_token_id": 0}
    for word in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts") if case.experts else ():
        sizes |= {word: case.experts, "num_experts_per_tok": 2, "moe_intermediate_size": 16}  # one of these names
    config = AutoConfig.for_model(case.kind, **sizes)
    with initialization.no_tie_weights():  # as from_pretrained does: embeddings are tied once they are split
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, experts_implementation="eager")
    for seed, weight in enumerate(model.parameters(), 100 * case.seed):
        torch.nn.init.normal_(weight, std=0.1, generator=torch.Generator().manual_seed(seed))
    return model.to(getattr(torch, case.dtype))


def train(case, model, dp_ranks):
    model.tie_weights(recompute_mapping=False)
    outcome, optimizer = {}, torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(case.steps):
        optimizer.zero_grad()
        outcome[f"loss/{step}"] = total = torch.zeros((), dtype=getattr(torch, case.dtype))
        for micro, dp_rank in ((micro, dp_rank) for micro in range(case.micro) for dp_rank in dp_ranks):
            first = case.samples(step, micro, dp_rank, 3).start  # the number of the first of 3 samples
            tokens = torch.randint(1, 96, (3, 13), generator=torch.Generator().manual_seed(first))
            logits = model(input_ids=tokens[:, :-1]).logits.flatten(0, 1)
            loss = cross_entropy(logits, tokens[:, 1:].flatten()) / (case.micro * len(dp_ranks))
            loss.backward()  # FSDP2 averages the gradients of the data ranks
            total += loss.detach()
        if len(dp_ranks) < case.dp:
            torch.distributed.all_reduce(total.div_(case.world_size))
        outcome |= {f"grad/{name}": w.grad.clone() for name, w in model.named_parameters() if step == 0}
        optimizer.step()
    return outcome | {f"param/{name}": weight.detach() for name, weight in model.named_parameters()}


def truth(case, device):
    return train(case, dense(case), range(case.dp))


def subject(case, device):
    model, dp_rank = dense(case), case.axis_rank("dp", torch.distributed.get_rank())
    plan = DistributedConfig(tp_size=case.tp, tp_plan="auto", fsdp_size=case.dp, ep_size=case.ep)
    # As from_pretrained(..., distributed_config=plan) does; that one needs a checkpoint and the package accelerate.
    plan, _, meshes = model.prepare_distribute_model(plan)
    return train(case, model.maybe_distribute_model(model, plan, meshes), [dp_rank])  # DTensors state their own place


subject.truth, subject.cases = truth, ("tp=2", "tp=2 dtype=float32")  # what runs when no case is named
subject.words = {"kind": "llama", "micro": 3, "tied": False, "experts": 0, "ep": 1, "etp": 1}  # beside tp, dp, steps
subject.refuses = lambda case: "" if case.world_size == case.tp * case.dp else "is parallel over tp, dp and ep"
