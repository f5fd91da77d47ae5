"""The trainer of `refit`: q, k, v, gate and up apart, over tp and dp; after every step it publishes its weights.

shardproof run "tp=2 dp=3" --subject shardproof.suites.subjects.refit_trainer:subject
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from shardproof import Shard
from shardproof.suites.subjects.regions import enter, leave

D, HEADS, INNER, VOCAB, TOKENS, PROMPTS = 4, 12, 24, 36, 7, range(900, 906)
SPLIT = {"q": 0, "k": 0, "v": 0, "o": 1, "gate": 0, "up": 0, "down": 1}  # the dim that the trainer splits over tp


def shapes_of(case):
    width, ours, kv = case.width, HEADS * D, case.kv * D
    shapes = {"embed": (VOCAB, width), "q": (ours, width), "k": (kv, width), "v": (kv, width), "o": (width, ours)}
    return {**shapes, "gate": (INNER, width), "up": (INNER, width), "down": (width, INNER), "head": (VOCAB, width)}


def attend(q, k, v):  # of the heads that this rank has
    q, k, v = (x.unflatten(-1, (-1, D)).transpose(1, 2) for x in (q, k, v))
    y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return y.transpose(1, 2).flatten(2)


def draw_tokens(numbers):
    return torch.stack([torch.randint(VOCAB, (TOKENS,), generator=torch.Generator().manual_seed(n)) for n in numbers])


def pick(logits, tokens):  # log-probabilities of the next tokens
    return logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)


class Trainer(nn.Module):
    def __init__(self, case, tp):
        super().__init__()
        self.tp = tp
        for seed, (name, shape) in enumerate(shapes_of(case).items(), 100 * case.seed):
            whole = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 0.3
            part = whole.chunk(tp.size(), SPLIT[name])[tp.rank()] if name in SPLIT else whole
            setattr(self, name, nn.Parameter(part.to(getattr(torch, case.dtype)).clone()))

    def forward(self, tokens):
        x = functional.embedding(tokens[:, :-1], self.embed)
        y = enter(functional.rms_norm(x, x.shape[-1:], eps=1e-6), self.tp)
        y = attend(*(functional.linear(y, weight) for weight in (self.q, self.k, self.v)))
        x = x + leave(functional.linear(y, self.o), self.tp)
        y = enter(x, self.tp)
        y = functional.silu(functional.linear(y, self.gate)) * functional.linear(y, self.up)
        return pick(functional.linear(x + leave(functional.linear(y, self.down), self.tp), self.head), tokens)


def shard(case, name, local, first):
    return Shard(local.clone(), (0, first) if SPLIT.get(name) else (first, 0), shapes_of(case)[name])


def train(case, publish):  # `publish` returns the exported weights and log-probabilities after a step
    mesh = dist.init_device_mesh("cpu", (case.dp, case.tp), mesh_dim_names=("dp", "tp"))
    tp, dp = mesh.get_group("tp"), mesh.get_group("dp")
    outcome, model = {}, Trainer(case, tp)
    named, optimizer = dict(model.named_parameters()), torch.optim.AdamW(model.parameters(), lr=0.02)

    def place(name, x):
        return shard(case, name, x, tp.rank() * x.shape[SPLIT[name]]) if name in SPLIT else x.clone()

    for step in range(case.steps):
        optimizer.zero_grad()
        total = torch.zeros((), dtype=getattr(torch, case.dtype))
        for micro in range(case.micro):
            tokens = draw_tokens(case.samples(step, micro, dp.rank(), 2))
            (loss := -model(tokens).mean() / (case.micro * case.dp)).backward()
            total += loss.detach()
        for x in (total, *(weight.grad for weight in named.values())):
            dist.all_reduce(x, group=dp)
        outcome |= {f"loss/{step}": total} | {f"grad/{n}": place(n, w.grad) for n, w in named.items() if step == 0}
        optimizer.step()
        weights, logs = publish(model, {name: weight.detach() for name, weight in named.items()}, place)
        outcome |= {f"served/{step}/{name}": x for name, x in weights.items()} | {f"logprob/{step}": logs}
    return outcome | {f"param/{name}": place(name, weight.detach()) for name, weight in named.items()}


def subject(case, device):
    @torch.no_grad()
    def publish(model, weights, place):
        return {name: place(name, x) for name, x in weights.items()}, model(draw_tokens(PROMPTS))

    return train(case, publish)


subject.words, subject.truth, subject.cases = {"width": 10, "kv": 2, "micro": 2}, "alone", ("tp=2 dp=3",)
subject.refuses = lambda case: "tp divides kv, and kv 12" if case.kv % case.tp or HEADS % case.kv else ""
