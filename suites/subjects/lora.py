"""LoRA by hand on a frozen MLP that is split over tp, with or without sequence parallelism, over dp.

shardproof run "tp=2 dp=3 sp=true follow=false" --subject shardproof.suites.subjects.lora:subject

A layer is W + scale B A. Where W is split by rows (up) B is too, and A is whole on every rank. Where W is split by
columns (down) A is too, and B is whole. With follow=false both are whole, and a rank uses its part. Gradients of whole
factors are summed over tp where ranks use different parts, or see different tokens (sp). B does not begin at 0, as in a
resumed run: otherwise the first gradient of A would be 0 whether it is right or wrong.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import gelu, linear

from shardproof import Shard
from shardproof.suites.subjects.regions import enter, gather, leave, scatter

TOKENS, INNER, SCALE = 12, 24, 2.0  # tokens of a sample


class Adapted(nn.Module):  # a frozen weight whose `dim` is split over tp, and its two factors
    def __init__(self, case, shape, dim, seed, tp):
        super().__init__()
        self.tp, self.dim, self.sp, (rows, columns) = tp, dim, case.sp, shape
        self.shapes = {"weight": shape, "a": (case.rank, columns), "b": (rows, case.rank)}
        self.used = {"weight": dim, "b" if dim == 0 else "a": dim} if tp else {}  # factors of which a rank uses a part
        self.held = {kind: dim for kind in self.used if case.follow or kind == "weight"}  # of which it has no more
        for number, (kind, size) in enumerate(self.shapes.items(), seed):
            whole = torch.randn(size, generator=torch.Generator().manual_seed(number), dtype=torch.float64) * 0.3
            part = self.part(whole, self.held.get(kind)).to(getattr(torch, case.dtype)).clone()
            setattr(self, kind, nn.Parameter(part, requires_grad=kind != "weight"))

    def part(self, whole, dim):
        return whole if dim is None else whole.chunk(self.tp.size(), dim)[self.tp.rank()]

    def factor(self, kind):
        return self.part(getattr(self, kind), self.used.get(kind) if kind not in self.held else None)

    def into(self, x):  # with sp a rank has a part of the tokens outside of split layers
        return gather(x, self.tp, 1) if self.sp else enter(x, self.tp)

    def out_of(self, x):
        return scatter(x, self.tp, 1) if self.sp else leave(x, self.tp)

    def forward(self, x):
        if self.dim == 0:  # A is used before tp splits the layer, so all ranks have a part of its gradient
            low = self.into(linear(x, self.a))
            return linear(self.into(x), self.weight) + SCALE * linear(low, self.factor("b"))
        low = self.out_of(linear(x, self.factor("a")))
        return self.out_of(linear(x, self.weight)) + SCALE * linear(low, self.b)

    def merged(self):  # as it would be exported
        return (self.weight + SCALE * self.factor("b") @ self.factor("a")).detach()

    def sum_gradients(self):
        for kind in ("a", "b"):
            if self.tp and kind not in self.held and (kind in self.used or self.sp):
                dist.all_reduce(getattr(self, kind).grad, group=self.tp)


class Model(nn.Module):
    def __init__(self, case, tp=None):
        super().__init__()
        self.tp, self.blocks = tp, nn.ModuleList()
        for seed in range(100 * case.seed, 100 * case.seed + 10 * case.layers, 10):
            up = Adapted(case, (INNER, case.width), 0, seed, tp)
            self.blocks.append(nn.ModuleDict({"up": up, "down": Adapted(case, (case.width, INNER), 1, seed + 5, tp)}))

    def forward(self, x):
        for block in self.blocks:
            x = x + block["down"](gelu(block["up"](x)))
        return x


def train(case, model, dp_ranks, dp=None):
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    outcome, optimizer, dtype = {}, torch.optim.AdamW(trained.values(), lr=0.01), getattr(torch, case.dtype)
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, Adapted)}
    for step in range(case.steps):
        optimizer.zero_grad()
        outcome[f"loss/{step}"] = total = torch.zeros((), dtype=dtype)
        for micro, dp_rank in ((micro, dp_rank) for micro in range(case.micro) for dp_rank in dp_ranks):
            draws = torch.Generator().manual_seed(case.samples(step, micro, dp_rank, 2).start)
            x = torch.randn(2, TOKENS, case.width, generator=draws, dtype=torch.float64).to(dtype)
            labels, elements = x.roll(1, 1), x.numel() * case.micro * case.dp
            if case.sp and dp:
                x, labels = (one.chunk(model.tp.size(), 1)[model.tp.rank()] for one in (x, labels))
            (loss := (model(x) - labels).square().sum() / elements).backward()
            total += loss.detach()
        if case.sp and dp:
            dist.all_reduce(total, group=model.tp)
        for layer in layers.values():
            layer.sum_gradients()
        for tensor in (total, *(weight.grad for weight in trained.values())) if dp else ():
            dist.all_reduce(tensor, group=dp)
        outcome |= {f"grad/{name}": weight.grad.clone() for name, weight in trained.items() if step == 0}
        optimizer.step()
    outcome |= {f"param/{name}": weight.detach() for name, weight in model.named_parameters()}
    return outcome | {f"merged/{name}.weight": layer.merged() for name, layer in layers.items()}


def subject(case, device):
    mesh = dist.init_device_mesh("cpu", (case.dp, case.tp), mesh_dim_names=("dp", "tp"))
    model = Model(case, mesh.get_group("tp"))
    outcome = train(case, model, [mesh.get_local_rank("dp")], mesh.get_group("dp"))
    for name, local in outcome.items():
        layer, _, kind = name.partition("/")[2].rpartition(".")
        if layer and kind in (held := model.get_submodule(layer).held):
            first = [mesh.get_local_rank("tp") * size * (dim == held[kind]) for dim, size in enumerate(local.shape)]
            outcome[name] = Shard(local, tuple(first), model.get_submodule(layer).shapes[kind])
    return outcome


subject.truth = lambda case, device: train(case, Model(case), range(case.dp))
subject.cases = ("tp=2 dp=3", "tp=3 sp=true", "tp=2 dp=2 sp=true follow=false dtype=float32")
subject.words = {"width": 10, "rank": 3, "layers": 2, "micro": 2, "sp": False, "follow": True}
subject.refuses = lambda case: "" if not (INNER % case.tp or TOKENS % case.tp) else "tp divides 12"
