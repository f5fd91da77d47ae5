"""torch.compile of a tensor-parallel block under DDP or FSDP2: the numbers and the ledger are those of plain code.

shardproof run "dp=3 data=fsdp2 compile=aot_eager" --subject shardproof.suites.subjects.compiled:subject

Every block is compiled by itself before FSDP2 shards it, as in torchtitan; DDP is compiled from outside, so that its
buckets cut the graph. compile=none is the same code as it is written. Collectives of a block are in its graph.
inductor needs a C++ compiler.
"""

import shutil

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from shardproof import Shard

INNER, TOKENS, ROWS = 12, 5, 3
SPLIT = {"up.weight": 0, "up.bias": 0, "down.weight": 1}  # the dim that tp splits


def all_reduce(x, group):
    x = x.clone()
    dist.all_reduce(x, group=group)
    return x


class Summed(torch.autograd.Function):  # a sum over tp where a block ends, and of gradients where it begins
    @staticmethod
    def forward(ctx, x, group, backward):
        ctx.group, ctx.backward = group, backward
        return x.view_as(x) if backward else all_reduce(x, group)

    @staticmethod
    def backward(ctx, gradient):
        return all_reduce(gradient.contiguous(), ctx.group) if ctx.backward else gradient, None, None


class Block(nn.Module):
    def __init__(self, case, rank, size, tp):
        super().__init__()
        self.tp, self.up, self.down = tp, nn.Linear(case.width, INNER), nn.Linear(INNER, case.width, bias=False)
        for name, weight in self.named_parameters():
            weight.data = weight.data.chunk(size, SPLIT[name])[rank].clone()

    def forward(self, x):
        y = x if self.tp is None else Summed.apply(x, self.tp, True)
        y = self.down(nn.functional.gelu(self.up(y)))
        return x + (y if self.tp is None else Summed.apply(y, self.tp, False))


def model_of(case, rank=0, size=1, tp=None):
    torch.manual_seed(case.seed)
    blocks = nn.Sequential(*(Block(case, rank, size, tp) for _ in range(2)))
    return blocks.to(getattr(torch, case.dtype))


def train(case, model, run, dp_ranks, group=None):
    outcome, optimizer, dtype = {}, torch.optim.AdamW(model.parameters(), lr=0.01), getattr(torch, case.dtype)
    for step in range(case.steps):
        optimizer.zero_grad()
        total = torch.zeros((), dtype=dtype)
        for micro, dp_rank in ((micro, dp_rank) for micro in range(case.micro) for dp_rank in dp_ranks):
            draws = torch.Generator().manual_seed(case.samples(step, micro, dp_rank, ROWS).start)
            x = torch.randn(ROWS, TOKENS, case.width, generator=draws, dtype=torch.float64).to(dtype)
            (loss := (run(x) - x.roll(1, 1)).square().mean() / (case.micro * len(dp_ranks))).backward()
            total += loss.detach()
        if group is not None:
            dist.all_reduce(total.div_(case.dp), group=group)
        outcome[f"loss/{step}"] = total
        outcome |= {f"grad/{name}": weight.grad.clone() for name, weight in model.named_parameters() if step == 0}
        optimizer.step()
    return outcome | {f"param/{name}": weight.detach() for name, weight in model.named_parameters()}


def subject(case, device):
    mesh = dist.init_device_mesh(device.type, (case.dp, case.tp), mesh_dim_names=("dp", "tp"))
    tp, group = mesh.get_local_rank("tp"), mesh.get_group("dp")
    run = model = model_of(case, tp, case.tp, mesh.get_group("tp") if case.tp > 1 else None)
    if case.data == "ddp":
        run = DistributedDataParallel(model, process_group=group)
        run = run if case.compile == "none" else torch.compile(run, backend=case.compile)
    for block in model if case.data == "fsdp2" else ():
        if case.compile != "none":
            block.compile(backend=case.compile, fullgraph=True)
        fully_shard(block, mesh=mesh["dp"])
    outcome = train(case, model, run, [mesh.get_local_rank("dp")], group)
    for name in [name for name in outcome if name.endswith(tuple(SPLIT))] if case.tp > 1 else ():
        dim, local = next(dim for parameter, dim in SPLIT.items() if name.endswith(parameter)), outcome[name]
        shape = [size * case.tp if axis == dim else size for axis, size in enumerate(local.shape)]
        first = [tp * size * (axis == dim) for axis, size in enumerate(local.shape)]
        outcome[name] = Shard(local, tuple(first), tuple(shape))
    return outcome


def refuses(case):
    if case.compile == "inductor" and not any(map(shutil.which, ("g++", "clang++", "c++"))):
        return "inductor needs a C++ compiler, and none is installed"
    if case.tp > 1 and case.data == "fsdp2":
        return "tp is proved under DDP"
    return "tp divides 12" if INNER % case.tp else ""


subject.truth = lambda case, device: train(case, model := model_of(case), model, range(case.dp))
subject.words = {"width": 10, "micro": 2, "data": ("ddp", "fsdp2"), "compile": ("none", "aot_eager", "inductor")}
subject.cases = (
    "dp=3 data=fsdp2 compile=aot_eager",
    "tp=2 dp=3 compile=aot_eager",
    "dp=2 compile=aot_eager dtype=float32",
)
subject.refuses = refuses
