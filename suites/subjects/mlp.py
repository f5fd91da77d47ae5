"""An MLP split over tp and trained over dp, compared with the same MLP in one process. Make it your own model.

shardproof calls `subject` on every rank, and `truth` once in float64. Their results are compared name by name.
"""

import torch
import torch.distributed as dist

from shardproof import Shard


def dense(case):  # the whole model; its weights follow from the seed alone, so they are the same everywhere
    layers = torch.nn.Linear(case.width, case.inner, bias=False), torch.nn.Linear(case.inner, case.width, bias=False)
    for seed, layer in enumerate(layers, case.seed):
        torch.nn.init.normal_(layer.weight, std=0.3, generator=torch.Generator().manual_seed(seed))
    return torch.nn.Sequential(layers[0], torch.nn.GELU(), layers[1]).to(getattr(torch, case.dtype))


def train(case, model, dp_ranks, group=None):
    outcome, optimizer = {}, torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(case.steps):
        optimizer.zero_grad()
        outcome[f"loss/{step}"] = total = torch.zeros((), dtype=getattr(torch, case.dtype))
        for micro, dp_rank in ((micro, dp_rank) for micro in range(case.micro) for dp_rank in dp_ranks):
            first = case.samples(step, micro, dp_rank, 5).start  # the number of the first of 5 samples
            x = torch.randn(5, case.width, generator=torch.Generator().manual_seed(first)).to(total.dtype)
            loss = model(x).square().mean() / (case.micro * case.dp)  # a part of the mean over the whole step
            loss.backward()
            total += loss.detach()
        for tensor in (total, *(weight.grad for weight in model.parameters())) if group else ():
            dist.all_reduce(tensor, group=group)
        outcome |= {f"grad/{name}": w.grad.clone() for name, w in model.named_parameters() if step == 0}
        optimizer.step()
    return outcome | {f"param/{name}": weight.detach() for name, weight in model.named_parameters()}


def truth(case, device):
    return train(case, dense(case), range(case.dp))


def subject(case, device):
    mesh = dist.init_device_mesh("cpu", (case.dp, case.tp), mesh_dim_names=("dp", "tp"))
    model, rows = dense(case), case.inner // case.tp
    first = mesh.get_local_rank("tp") * rows
    model[0].weight.data = model[0].weight.data[first : first + rows].clone()
    model[2].weight.data = model[2].weight.data[:, first : first + rows].clone()
    # Summed in place, unseen by autograd: the gradient of a sum is that of each of its terms.
    model[2].register_forward_hook(lambda layer, x, y: dist.all_reduce(y.detach(), group=mesh.get_group("tp")))
    outcome = train(case, model, [mesh.get_local_rank("dp")], mesh.get_group("dp"))
    for kind in ("grad", "param"):  # a part of a tensor is returned with its offsets and the full shape
        outcome[f"{kind}/0.weight"] = Shard(outcome[f"{kind}/0.weight"], (first, 0), (case.inner, case.width))
        outcome[f"{kind}/2.weight"] = Shard(outcome[f"{kind}/2.weight"], (0, first), (case.width, case.inner))
    return outcome


subject.truth, subject.cases = truth, ("tp=2 dp=3", "tp=4 dtype=float32")  # what runs when no case is named
subject.words = {"width": 12, "inner": 24, "micro": 3}  # words of a case beside tp, dp, steps, dtype, seed
subject.refuses = lambda case: "inner must be a multiple of tp" if case.inner % case.tp else ""
