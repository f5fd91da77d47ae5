"""Two programs: a trainer over tp and dp, and the inference layout to which its ranks hand the weights of every step.

shardproof run "tp=2 dp=3 serve=6" --subject shardproof.suites.subjects.refit:subject

The trainer has q, k, v, gate and up apart. Inference fuses q, k and v in one weight, gate and up in another, and splits
them over `serve` ranks. Where it has more ranks than heads of k and v, neighbours hold the same head. It computes
log-probabilities of fixed prompts, and exports its weights by their names. The truth is the trainer alone, on as many
ranks of tp as there are heads of k and v: its own weights, and its own log-probabilities.
"""

import torch
import torch.distributed as dist
from torch.nn import functional

from shardproof import Shard
from shardproof.suites.subjects.refit_trainer import (
    HEADS,
    INNER,
    PROMPTS,
    SPLIT,
    TOKENS,
    VOCAB,
    D,
    attend,
    draw_tokens,
    pick,
    shard,
    train,
)
from shardproof.suites.subjects.regions import leave


class Inference:
    def __init__(self, case, group):
        self.case, self.group, self.rank, self.size = case, group, group.rank(), group.size()
        rows, shared = HEADS * D // self.size, max(1, self.size // case.kv)  # ranks that share a head of k and v
        kv = case.kv * D * shared // self.size
        sizes = {"q": rows, "k": kv, "v": kv, "o": rows, **dict.fromkeys(("gate", "up", "down"), INNER // self.size)}
        self.parts = {name: (self.rank // (shared if name in "kv" else 1) * many, many) for name, many in sizes.items()}
        self.parts["head"] = (self.rank * VOCAB // self.size, VOCAB // self.size)

    def load(self, weights):  # whole tensors by name
        parts = {name: weights[name].narrow(SPLIT.get(name, 0), *part) for name, part in self.parts.items()}
        self.qkv, self.gate_up = (torch.cat([parts[n] for n in names]) for names in (("q", "k", "v"), ("gate", "up")))
        self.embed = weights["embed"].clone()
        self.o, self.down, self.head = (parts[name].clone() for name in ("o", "down", "head"))

    def __call__(self, tokens):
        x = functional.embedding(tokens[:, :-1], self.embed)
        y = functional.linear(functional.rms_norm(x, x.shape[-1:], eps=1e-6), self.qkv)
        x = x + leave(functional.linear(attend(*y.split([self.parts[n][1] for n in "qkv"], -1)), self.o), self.group)
        gate, up = functional.linear(x, self.gate_up).chunk(2, -1)
        x = x + leave(functional.linear(functional.silu(gate) * up, self.down), self.group)
        logits = functional.linear(x, self.head)
        parts = [torch.empty_like(logits) for _ in range(self.size)]
        dist.all_gather(parts, logits, group=self.group)
        return pick(torch.cat(parts, -1), tokens)

    def export(self):  # by the names of the trainer, with the place of each part in its tensor
        held = dict(zip("qkv", self.qkv.split([self.parts[name][1] for name in "qkv"]), strict=True))
        held |= dict(zip(("gate", "up"), self.gate_up.chunk(2), strict=True), o=self.o, down=self.down, head=self.head)
        exported = {name: shard(self.case, name, x, self.parts[name][0]) for name, x in held.items()}
        return {"embed": self.embed, **exported}


def subject(case, device):
    replicas = dist.get_world_size() // case.serve
    mesh = dist.init_device_mesh("cpu", (replicas, case.serve), mesh_dim_names=("replica", "serve"))
    engine, many = Inference(case, mesh.get_group("serve")), len(PROMPTS) // replicas
    first = mesh.get_local_rank("replica") * many

    @torch.no_grad()
    def publish(model, weights, place):
        whole = dict(weights)
        for name, dim in SPLIT.items():
            parts = [torch.empty_like(weights[name]) for _ in range(model.tp.size())]
            dist.all_gather(parts, weights[name].contiguous(), group=model.tp)
            whole[name] = torch.cat(parts, dim)
        engine.load(whole)
        logs = engine(draw_tokens(PROMPTS[first : first + many]))
        return engine.export(), Shard(logs, (first, 0), (len(PROMPTS), TOKENS - 1))

    return train(case, publish)


def refuses(case):
    if case.kv % case.tp or HEADS % case.kv or HEADS % case.serve or len(PROMPTS) * case.serve % case.world_size:
        return "tp divides kv, kv and serve divide 12, and the replicas of inference divide 6"
    fits = not case.world_size % case.serve and not (case.serve % case.kv and case.kv % case.serve)
    return "" if fits else "serve divides the ranks, and divides kv or is divided by it"


def axes(case):
    world, serve = case.world_size, case.serve
    lists = [range(first, first + serve) for first in range(0, world, serve)]
    return {"serve": lists, "replica": [range(first, world, serve) for first in range(serve)]}


subject.truth = "shardproof.suites.subjects.refit_trainer:subject tp={kv}"
subject.words = {"width": 10, "kv": 2, "micro": 2, "serve": 2}
subject.cases = ("tp=2 dp=3 serve=6", "tp=3 dp=2 kv=6 serve=3", "tp=2 dp=2 serve=4 dtype=float32")
subject.refuses, subject.axes = refuses, axes
