"""Muon by hand: attention split over tp by heads and an MLP, whose updates are shared out in one of three ways.

shardproof run "tp=2 dp=3 update=owner" --subject shardproof.suites.subjects.muon:subject

The momentum of a matrix is orthogonalised whole, by Newton-Schulz. Query, key and value of each head are matrices by
themselves, for which tp sends nothing. Every rank gathers each other matrix (gather), or one rank of tp does and sends
the result (owner), or ranks exchange parts of matrices for whole ones and back (alltoall).
"""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from shardproof import Shard, Term, phase
from shardproof.suites.subjects.muon_shares import SHARES, SPLIT, make_orthogonal, terms_of
from shardproof.suites.subjects.regions import enter, leave

D, TOKENS = 4, 5  # features of a head, tokens of a sample
SHARED = ("out", "up", "down")  # weights whose updates need the whole matrix


def shapes_of(case):  # of whole matrices
    ours, width = case.heads * D, case.width
    return {"qkv": (3 * ours, width), "out": (width, ours), "up": (36, width), "down": (width, 36)}


class Model(nn.Module):
    def __init__(self, case, rank=0, tp=None):
        super().__init__()
        self.tp, size = tp, case.tp if tp else 1
        for seed, (name, shape) in enumerate(shapes_of(case).items(), 100 * case.seed):
            weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 0.3
            part = weight.chunk(size, SPLIT[name])[rank]
            setattr(self, name, nn.Parameter(part.to(getattr(torch, case.dtype)).clone()))

    def forward(self, x):
        q, k, v = functional.linear(enter(x, self.tp), self.qkv).unflatten(-1, (-1, 3, D)).transpose(1, 3).unbind(1)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + leave(functional.linear(y, self.out), self.tp)
        y = functional.gelu(functional.linear(enter(x, self.tp), self.up))
        return x + leave(functional.linear(y, self.down), self.tp)


class Muon:
    def __init__(self, case, model):
        self.case, self.model = case, model
        self.heads = case.heads // (model.tp.size() if model.tp else 1)
        self.momenta = {name: torch.zeros_like(weight) for name, weight in model.named_parameters()}

    @torch.no_grad()
    def step(self):
        weights, updates, tp = dict(self.model.named_parameters()), {}, self.model.tp
        for name, momentum in self.momenta.items():
            momentum.mul_(0.95).add_(weights[name].grad)
            updates[name] = weights[name].grad + 0.95 * momentum
        parts = {name: updates[name] for name in SHARED}
        if tp:
            SHARES[self.case.update](parts, tp)
        else:
            parts = {name: make_orthogonal(part) for name, part in parts.items()}
        each = updates["qkv"].unflatten(0, (self.heads * 3, -1))  # query, key and value of every head
        parts["qkv"] = torch.cat([make_orthogonal(one) for one in each])
        for name, weight in weights.items():
            rows, columns = shapes_of(self.case)[name]
            weight.mul_(1 - 0.02 * 0.1).sub_(0.02 * math.sqrt(max(1, rows / columns)) * parts[name])


def train(case, model, dp_ranks, group=None):
    outcome, optimizer, dtype = {}, Muon(case, model), getattr(torch, case.dtype)
    for step in range(case.steps):
        outcome[f"loss/{step}"] = total = torch.zeros((), dtype=dtype)
        model.zero_grad()
        for micro, dp_rank in ((micro, dp_rank) for micro in range(case.micro) for dp_rank in dp_ranks):
            draws = torch.Generator().manual_seed(case.samples(step, micro, dp_rank, 2).start)
            x = torch.randn(2, TOKENS, case.width, generator=draws, dtype=torch.float64).to(dtype)
            (loss := (model(x) - x.roll(-1, 1)).square().mean() / (case.micro * case.dp)).backward()
            total += loss.detach()
        for tensor in (total, *(weight.grad for weight in model.parameters())) if group else ():
            dist.all_reduce(tensor, group=group)
        outcome |= {f"grad/{name}": w.grad.clone() for name, w in model.named_parameters() if step == 0}
        with phase("step"):  # stated by hand: nothing else distinguishes a gather of updates from one of gradients
            optimizer.step()
    return outcome | {f"param/{name}": weight.detach() for name, weight in model.named_parameters()}


def truth(case, device):
    return train(case, Model(case), range(case.dp))


def subject(case, device):
    mesh = dist.init_device_mesh("cpu", (case.dp, case.tp), mesh_dim_names=("dp", "tp"))
    dp, tp = mesh.get_coordinate()
    outcome = train(case, Model(case, tp, mesh.get_group("tp")), [dp], mesh.get_group("dp"))
    for name in (name for name in outcome if "/" in name and name.partition("/")[2] in SPLIT):
        dim, local = SPLIT[name.partition("/")[2]], outcome[name]
        offsets = (tp * local.shape[0], 0) if dim == 0 else (0, tp * local.shape[1])
        outcome[name] = Shard(local, offsets, shapes_of(case)[name.partition("/")[2]])
    return outcome


def expected(case):
    size = getattr(torch, case.dtype).itemsize
    sizes = {name: rows * columns * size for name, (rows, columns) in shapes_of(case).items()}
    hidden = {"op": "all_reduce", "axis": "tp", "payload_bytes": 2 * TOKENS * case.width * size}
    calls, summed = case.steps * case.micro, case.steps * (size + sum(sizes.values()) // case.tp)
    terms = [Term(phase="forward", calls=2 * calls, **hidden), Term(phase="backward", calls=calls, **hidden)]
    terms += terms_of(case, {name: sizes[name] for name in SHARED})
    return [*terms, Term(phase="grad_sync", op="all_reduce", axis="dp", calls=5 * case.steps, total_bytes=summed)]


subject.truth, subject.expected = truth, expected
subject.cases = ("tp=2 dp=3", "tp=3 update=owner", "tp=2 dp=2 update=alltoall dtype=float32")
subject.words = {"width": 10, "heads": 6, "micro": 2, "update": tuple(SHARES)}
subject.refuses = lambda case: "tp divides heads and 36" if any(n % case.tp for n in (case.heads, 36)) else ""
