"""torch's plans for tensor, sequence and loss parallelism, times FSDP2 over the data ranks.

shardproof run "tp=2 dp=2 sp=true loss_parallel=true" --subject shardproof.suites.subjects.two_d:subject
"""

import torch
from torch import nn
from torch.distributed import all_reduce, fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, parallel

from shardproof import softmax_shift


def dense(case):  # the whole model, the same on every rank: its weights follow from the seed
    model = nn.Sequential()
    model.embedding, model.norm = nn.Embedding(33, case.width), nn.LayerNorm(case.width)
    model.up, model.act, model.down = nn.Linear(case.width, 24), nn.GELU(), nn.Linear(24, case.width)
    model.head, model.log = nn.Linear(case.width, 33), nn.LogSoftmax(-1)
    for seed, weight in enumerate(model.parameters(), 100 * case.seed):
        nn.init.normal_(weight, std=0.3, generator=torch.Generator().manual_seed(seed))
    return model.to(getattr(torch, case.dtype))


def train(case, model, dp_ranks):  # on the micro-batches of these data ranks
    outcome, optimizer = {}, torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(case.steps):
        optimizer.zero_grad()
        losses = []
        for micro, dp_rank in ((micro, dp_rank) for micro in range(case.micro) for dp_rank in dp_ranks):
            draws = [torch.Generator().manual_seed(number) for number in case.samples(step, micro, dp_rank, 2)]
            tokens = torch.stack([torch.randint(33, (13,), generator=draw) for draw in draws])  # 2 sequences of 13
            logs = model(tokens[:, :-1])
            loss = nn.functional.nll_loss(logs.flatten(0, 1), tokens[:, 1:].flatten()) / (case.micro * len(dp_ranks))
            loss.backward()
            losses.append(loss.full_tensor() if isinstance(loss, DTensor) else loss)
        outcome[f"loss/{step}"] = torch.stack(losses).sum().detach()
        if step == 0:
            outcome |= {f"grad/{name}": weight.grad.clone() for name, weight in model.named_parameters()}
        optimizer.step()
    return outcome | {f"param/{name}": weight.detach() for name, weight in model.named_parameters()}


def subject(case, device):  # returns DTensors as they are: they know how they lie
    mesh = init_device_mesh(device.type, (case.dp, case.tp), mesh_dim_names=("dp", "tp"))
    hidden = Shard(1) if case.sp else Replicate()  # with sequence parallelism a rank has a part of every sequence
    plan = {"embedding": parallel.RowwiseParallel(input_layouts=Replicate(), output_layouts=hidden)}
    plan |= {"up": parallel.ColwiseParallel(input_layouts=hidden)}
    plan |= {"down": parallel.RowwiseParallel(output_layouts=hidden)}
    plan |= {"norm": parallel.SequenceParallel()} if case.sp else {}
    logits, local = (Shard(-1), False) if case.loss_parallel else (Replicate(), True)
    plan["head"] = parallel.ColwiseParallel(input_layouts=hidden, output_layouts=logits, use_local_output=local)
    model = parallel.parallelize_module(dense(case), mesh["tp"], plan)
    if case.dp > 1:
        model = fsdp.fully_shard(model, mesh=mesh["dp"])  # its gradients are the mean over the data ranks
    outcome = train(case, model, [mesh.get_local_rank("dp")])
    for step in range(case.steps):
        all_reduce(outcome[f"loss/{step}"].div_(case.dp), group=mesh.get_group("dp"))
    return outcome


subject.truth = lambda case, device: train(case, dense(case), range(case.dp))
subject.words = {"width": 9, "sp": False, "loss_parallel": False, "micro": 3}
subject.cases = ("tp=2", "tp=3 sp=true", "tp=2 sp=true loss_parallel=true", "tp=2 dp=2 sp=true dtype=float32")
subject.session = parallel.loss_parallel  # patches torch: entered once, not by every rank
subject.harmless = softmax_shift
