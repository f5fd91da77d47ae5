"""LoRA of peft on a tiny Llama of transformers, sharded over the data ranks by FSDP2 or copied by DDP.

shardproof run "dp=3 targets=all" --subject shardproof.suites.subjects.lora_peft:subject
"""

import torch
import torch.distributed as dist
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


def dense(case):
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=40, num_hidden_layers=2, **sizes)
    targets = {"attention": ["q_proj", "v_proj"], "all": "all-linear"}[case.targets]
    lora = LoraConfig(r=3, lora_alpha=6, target_modules=targets)
    model = get_peft_model(transformers.LlamaForCausalLM(config), lora)
    for seed, weight in enumerate(model.parameters(), 1000 * case.seed):
        draws = torch.Generator().manual_seed(seed)
        weight.data = torch.randn(weight.shape, generator=draws, dtype=torch.float64).mul_(0.2)
    return model.to(getattr(torch, case.dtype))


def train(case, model, dp_ranks, group=None):
    trained = {n.replace("module.", ""): w for n, w in model.named_parameters() if w.requires_grad}
    outcome, optimizer = {}, torch.optim.AdamW(trained.values(), lr=0.01)
    for step in range(case.steps):
        optimizer.zero_grad()
        outcome[f"loss/{step}"] = total = torch.zeros((), dtype=getattr(torch, case.dtype))
        for micro, dp_rank in ((micro, dp_rank) for micro in range(case.micro) for dp_rank in dp_ranks):
            draws = torch.Generator().manual_seed(case.samples(step, micro, dp_rank, 2).start)
            tokens = torch.randint(40, (2, 9), generator=draws)
            logits = model(input_ids=tokens[:, :-1], use_cache=False).logits.flatten(0, 1)
            # Over the samples of this rank: FSDP2 and DDP average the gradients of the data ranks.
            loss = nn.functional.cross_entropy(logits, tokens[:, 1:].flatten()) / (case.micro * len(dp_ranks))
            loss.backward()
            total += loss.detach()
        if group:
            dist.all_reduce(total.div_(case.dp), group=group)
        outcome |= {f"grad/{name}": weight.grad.clone() for name, weight in trained.items() if step == 0}
        optimizer.step()
    return outcome | {f"param/{n.replace('module.', '')}": w.detach() for n, w in model.named_parameters()}


def subject(case, device):
    mesh, model = dist.init_device_mesh("cpu", (case.dp,), mesh_dim_names=("dp",)), dense(case)
    if case.ddp:
        return train(case, DistributedDataParallel(model), [dist.get_rank()], mesh.get_group("dp"))
    for layer in [*model.get_base_model().model.layers, model]:
        fully_shard(layer, mesh=mesh)  # frozen weights too: they are gathered and never scattered
    return train(case, model, [mesh.get_local_rank("dp")], mesh.get_group("dp"))


subject.truth = lambda case, device: train(case, dense(case), range(case.dp))
subject.cases = ("dp=3", "dp=2 targets=all dtype=float32", "dp=2 ddp=true")
subject.words = {"micro": 2, "targets": ("attention", "all"), "ddp": False}
subject.refuses = lambda case: "shards over dp alone" if case.world_size > case.dp else ""
