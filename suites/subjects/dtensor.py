"""A small language model split over tp by DTensor's styles (sequence and loss parallel too), trained over dp.
shardproof calls `subject` on every rank, and `truth` once in float64. Their results are compared name by name."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard, parallel

from shardproof import softmax_shift

PLAN = {  # what is verified: put your model and your plan here
    "0": parallel.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "1": parallel.SequenceParallel(),
    "2": parallel.ColwiseParallel(input_layouts=Shard(1)),
    "4": parallel.RowwiseParallel(output_layouts=Shard(1)),
    "5": parallel.ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
}


def dense(case):  # the whole model; its weights follow from the seed alone, so they are the same everywhere
    layers = [nn.Embedding(case.vocab, case.width), nn.LayerNorm(case.width), nn.Linear(case.width, 48), nn.GELU()]
    model = nn.Sequential(*layers, nn.Linear(48, case.width), nn.Linear(case.width, case.vocab))
    for seed, weight in enumerate(model.parameters(), 100 * case.seed):
        nn.init.normal_(weight, std=0.3, generator=torch.Generator().manual_seed(seed))
    return model.to(getattr(torch, case.dtype))


def train(case, model, dp_ranks, group=None):
    outcome, optimizer = {}, torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(case.steps):
        optimizer.zero_grad()
        outcome[f"loss/{step}"] = total = torch.zeros((), dtype=getattr(torch, case.dtype))
        for micro, dp_rank in ((micro, dp_rank) for micro in range(case.micro) for dp_rank in dp_ranks):
            first = case.samples(step, micro, dp_rank, 3).start  # the number of the first of 3 samples
            tokens = torch.randint(case.vocab, (3, 13), generator=torch.Generator().manual_seed(first))
            logits = model(tokens[:, :-1]).flatten(0, 1)
            loss = nn.functional.cross_entropy(logits, tokens[:, 1:].flatten()) / (case.micro * case.dp)
            loss.backward()
            total += (loss.full_tensor() if group else loss).detach()
        for tensor in (total, *(weight.grad.to_local() for weight in model.parameters())) if group else ():
            dist.all_reduce(tensor, group=group)
        outcome |= {f"grad/{name}": w.grad.clone() for name, w in model.named_parameters() if step == 0}
        optimizer.step()
    return outcome | {f"param/{name}": weight.detach() for name, weight in model.named_parameters()}


def truth(case, device):
    return train(case, dense(case), range(case.dp))


def subject(case, device):
    mesh = dist.init_device_mesh("cpu", (case.dp, case.tp), mesh_dim_names=("dp", "tp"))
    model = parallel.parallelize_module(dense(case), mesh["tp"], PLAN, src_data_rank=None)
    return train(case, model, [mesh.get_local_rank("dp")], mesh.get_group("dp"))  # DTensors state their own place


subject.truth, subject.cases = truth, ("tp=2 dp=3", "tp=4 dtype=float32")  # what runs when no case is named
subject.words = {"width": 16, "vocab": 40, "micro": 3}  # words of a case beside tp, dp, steps, dtype, seed
subject.session = parallel.loss_parallel  # a context around all ranks: it changes DTensor for the whole process
subject.harmless = softmax_shift  # why a fault of a collective may change nothing
