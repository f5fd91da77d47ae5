"""A network sharded over the data ranks by FSDP2 (fully_shard), compared with the same network in one process.

shardproof calls `subject` on every rank, and `truth` once in float64. Their results are compared name by name.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


def dense(case):  # the whole model; its weights follow from the seed alone, so they are the same everywhere
    sizes = [case.width] * case.layers
    layers = [nn.Sequential(nn.LayerNorm(size), nn.Linear(size, size), nn.GELU()) for size in sizes]
    model = nn.Sequential(*layers, nn.Linear(case.width, 7))
    for seed, weight in enumerate(model.parameters(), 100 * case.seed):
        nn.init.normal_(weight, std=0.3, generator=torch.Generator().manual_seed(seed))
    return model.to(getattr(torch, case.dtype))


def train(case, model, dp_ranks, group=None, optimizer=None):
    outcome, optimizer = {}, optimizer or torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(case.steps):
        optimizer.zero_grad()
        outcome[f"loss/{step}"] = total = torch.zeros((), dtype=getattr(torch, case.dtype))
        for micro, dp_rank in ((micro, dp_rank) for micro in range(case.micro) for dp_rank in dp_ranks):
            numbers = case.samples(step, micro, dp_rank, 5)  # 5 samples, the same in no other micro-batch, rank or step
            x = torch.randn(5, case.width, generator=torch.Generator().manual_seed(numbers.start)).to(total.dtype)
            # Over the samples of this rank: FSDP averages the gradients of the data ranks.
            loss = nn.functional.cross_entropy(model(x), torch.tensor(numbers) % 7) / (case.micro * len(dp_ranks))
            loss.backward()
            total += loss.detach()
        if group:
            dist.all_reduce(total, group=group)
            total /= case.dp
        outcome |= {f"grad/{name}": w.grad.clone() for name, w in model.named_parameters() if step == 0}
        optimizer.step()
    return outcome | {f"param/{name}": weight.detach() for name, weight in model.named_parameters()}


def truth(case, device):
    return train(case, dense(case), range(case.dp))


def subject(case, device):
    mesh = dist.init_device_mesh("cpu", (case.dp,), mesh_dim_names=("dp",))
    model = dense(case)
    for layer in [*model, model]:
        fully_shard(layer, mesh=mesh)
    return train(case, model, [mesh.get_local_rank("dp")], mesh.get_group("dp"))  # DTensors state their own place


subject.truth, subject.cases = truth, ("dp=3", "dp=2 dtype=float32")  # what runs when no case is named
subject.words = {"width": 10, "layers": 2, "micro": 3}  # words of a case beside dp, steps, dtype, seed
subject.refuses = lambda case: "shards over dp alone" if case.world_size > case.dp else ""
