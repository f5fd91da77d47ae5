"""torch.optim.Muon on DTensors: a network under torch's tensor-parallel plan and FSDP2.

shardproof run "tp=2 dp=3 steps=1" --subject shardproof.suites.subjects.muon_fsdp2:subject

Muon multiplies in bfloat16 whatever the case's dtype. DTensor gathers what Newton-Schulz needs, in that dtype.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import parallel


class Layers(nn.Sequential):
    def forward(self, x):
        return super().forward(x).clone()  # FSDP2 warns of a module that returns a view


def dense(case):
    layers = [nn.Linear(case.width, 24, bias=False), nn.Linear(24, case.width, bias=False)]
    model = Layers(layers[0], nn.GELU(), layers[1])
    for seed, weight in enumerate(model.parameters(), 100 * case.seed):
        draws = torch.Generator().manual_seed(seed)
        weight.data = torch.randn(weight.shape, generator=draws, dtype=torch.float64).mul_(0.3)
    return model.to(getattr(torch, case.dtype))


def train(case, model, dp_ranks, group=None):
    outcome, optimizer = {}, torch.optim.Muon(model.parameters(), lr=0.1, ns_steps=case.ns_steps)
    for step in range(case.steps):
        optimizer.zero_grad()
        outcome[f"loss/{step}"] = total = torch.zeros((), dtype=getattr(torch, case.dtype))
        for micro, dp_rank in ((micro, dp_rank) for micro in range(case.micro) for dp_rank in dp_ranks):
            draws = torch.Generator().manual_seed(case.samples(step, micro, dp_rank, 5).start)
            x = torch.randn(5, case.width, generator=draws, dtype=torch.float64).to(total.dtype)
            (loss := (model(x) - x.roll(1, 0)).square().mean() / (case.micro * len(dp_ranks))).backward()
            total += loss.detach()
        if group:  # FSDP2 averages the gradients of the data ranks
            dist.all_reduce(total, group=group)
            total /= case.dp
        outcome |= {f"grad/{name}": w.grad.clone() for name, w in model.named_parameters() if step == 0}
        optimizer.step()
    return outcome | {f"param/{name}": weight.detach() for name, weight in model.named_parameters()}


def subject(case, device):
    mesh, model = dist.init_device_mesh("cpu", (case.dp, case.tp), mesh_dim_names=("dp", "tp")), dense(case)
    plan = {"0": parallel.ColwiseParallel(), "2": parallel.RowwiseParallel()}
    if case.tp > 1:
        parallel.parallelize_module(model, mesh["tp"], plan, src_data_rank=None)
    if case.dp > 1:
        fully_shard(model, mesh=mesh["dp"])
    return train(case, model, [mesh.get_local_rank("dp")], mesh.get_group("dp"))


subject.truth = lambda case, device: train(case, dense(case), range(case.dp))
subject.cases = ("tp=2 dp=3 steps=1", "dp=4 dtype=float32", "tp=2 steps=1 dtype=bfloat16")
subject.words = {"width": 12, "micro": 2, "ns_steps": 2}  # 5 amplify bfloat16 rounding to half an update
subject.refuses = lambda case: "is parallel over tp and dp" if case.world_size > case.tp * case.dp else ""
