"""A Hugging Face model split over tp by the library's own plan, compared with the same model in one process.

shardproof calls `subject` on every rank, and `truth` once in float64. What they return is compared name by name. Needs
transformers 5.
"""

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, initialization
from transformers.distributed import DistributedConfig


def dense(case):  # the whole model; its weights follow from the seed alone, so they are the same everywhere
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 96, "head_dim": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": case.tied}
    config = AutoConfig.for_model(case.kind, **sizes)
    with initialization.no_tie_weights():  # as from_pretrained does: embeddings are tied once they are split
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, experts_implementation="eager")
    for seed, weight in enumerate(model.parameters(), 100 * case.seed):
        torch.nn.init.normal_(weight, std=0.1, generator=torch.Generator().manual_seed(seed))
    return model.to(getattr(torch, case.dtype))


def train(case, model):
    model.tie_weights(recompute_mapping=False)
    outcome, optimizer = {}, torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(case.steps):
        optimizer.zero_grad()
        outcome[f"loss/{step}"] = total = torch.zeros((), dtype=getattr(torch, case.dtype))
        for micro in range(case.micro):
            first = case.samples(step, micro, 0, 3).start  # the number of the first of 3 samples
            tokens = torch.randint(96, (3, 13), generator=torch.Generator().manual_seed(first))
            logits = model(input_ids=tokens[:, :-1]).logits.flatten(0, 1)
            loss = cross_entropy(logits, tokens[:, 1:].flatten()) / case.micro
            loss.backward()
            total += loss.detach()
        outcome |= {f"grad/{name}": w.grad.clone() for name, w in model.named_parameters() if step == 0}
        optimizer.step()
    return outcome | {f"param/{name}": weight.detach() for name, weight in model.named_parameters()}


def truth(case, device):
    return train(case, dense(case))


def subject(case, device):
    model, plan = dense(case), DistributedConfig(tp_size=case.tp, tp_plan="auto")
    # As from_pretrained(..., distributed_config=plan) does; that one needs a checkpoint and the package accelerate.
    plan, _, meshes = model.prepare_distribute_model(plan)
    return train(case, model.maybe_distribute_model(model, plan, meshes))  # DTensors are returned as they are


subject.truth, subject.cases = truth, ("tp=2", "tp=2 dtype=float32")  # what runs when no case is named
subject.words = {"kind": "llama", "micro": 3, "tied": False}  # words of a case beside tp, steps, dtype, seed
subject.refuses = lambda case: "is split over tp alone" if case.world_size > case.tp else ""
