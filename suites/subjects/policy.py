"""A policy's loss as in PPO and GRPO: a vocabulary over tp, rows over cp and dp, a frozen reference, advantages.

shardproof run "tp=2 cp=2 dp=3 mean=sequence" --subject shardproof.suites.subjects.policy:subject

Only tokens of responses count, and rows have different numbers of these. Means over them, and the mean and deviation of
advantages, are over the whole step: over all data ranks, context ranks and micro-batches.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from shardproof import Shard
from shardproof.suites.subjects.regions import enter, leave

TOKENS, VOCAB, ROWS = 24, 30, 2  # of a row, and rows of a micro-batch


class Policy(nn.Module):
    def __init__(self, case, rank=0, tp=None, moved=0.0):
        super().__init__()
        self.tp, self.first, self.size = tp, rank * VOCAB // case.tp if tp else 0, VOCAB // case.tp if tp else VOCAB
        shapes = {"embed": (VOCAB, case.width), "hidden": (case.width, case.width), "head": (VOCAB, case.width)}
        for seed, (name, shape) in enumerate(shapes.items(), 100 * case.seed):
            draws = torch.Generator().manual_seed(seed)
            weight, move = (torch.randn(shape, generator=draws, dtype=torch.float64) for _ in range(2))
            weight = 0.4 * weight + moved * move
            weight = weight[self.first : self.first + self.size] if name == "head" else weight
            setattr(self, name, nn.Parameter(weight.to(getattr(torch, case.dtype)).clone()))

    def forward(self, tokens, labels):  # log-probabilities of the labels, whose logits are on one rank of tp each
        x = functional.gelu(functional.linear(functional.embedding(tokens, self.embed), self.hidden))
        logits = functional.linear(enter(x, self.tp), self.head)
        largest = logits.detach().amax(-1)
        if self.tp:
            dist.all_reduce(largest, dist.ReduceOp.MAX, self.tp)
        own = (labels >= self.first) & (labels < self.first + self.size)
        chosen = logits.gather(-1, ((labels - self.first) * own)[..., None]).squeeze(-1) * own
        total = leave((logits - largest[..., None]).exp().sum(-1), self.tp)
        return leave(chosen, self.tp) - largest - total.log()


def draw_row(number, dtype):  # tokens, labels, whether a label is one of the response, and the reward of every token
    draws = torch.Generator().manual_seed(number)
    tokens = torch.randint(VOCAB, (TOKENS + 1,), generator=draws)
    first, last = (int(torch.randint(low, high, (), generator=draws)) for low, high in ((2, 10), (11, TOKENS)))
    rewards = torch.randn((), generator=draws, dtype=torch.float64) + 0.3 * torch.randn(TOKENS, generator=draws)
    counts = (torch.arange(TOKENS) >= first) & (torch.arange(TOKENS) < last)
    return tokens[:-1], tokens[1:], counts.to(dtype), rewards.to(dtype)


def sum_over(x, group):  # the sum over ranks
    if group:
        dist.all_reduce(x, group=group)
    return x


def train(case, model, reference, dp_ranks, part=0, cp=None, group=None):
    outcome, optimizer, dtype = {}, torch.optim.AdamW(model.parameters(), lr=0.01), getattr(torch, case.dtype)
    size = TOKENS // (case.cp if group else 1)
    for step in range(case.steps):
        batches = []
        for micro, dp_rank in ((micro, dp_rank) for micro in range(case.micro) for dp_rank in dp_ranks):
            rows = [draw_row(number, dtype) for number in case.samples(step, micro, dp_rank, ROWS)]
            batches.append([torch.stack(each)[:, part * size : (part + 1) * size] for each in zip(*rows, strict=True)])
        count = sum_over(sum(mask.sum() for _, _, mask, _ in batches), group)
        mean = sum_over(sum((mask * reward).sum() for _, _, mask, reward in batches), group) / count
        spread = sum_over(sum((mask * (reward - mean).square()).sum() for _, _, mask, reward in batches), group) / count
        optimizer.zero_grad()
        loss, distance = torch.zeros((), dtype=dtype), torch.zeros((), dtype=dtype)
        for tokens, labels, mask, reward in batches:
            advantage, logs = (reward - mean) / (spread.sqrt() + 1e-6), model(tokens, labels)
            with torch.no_grad():
                before = reference(tokens, labels)  # it drew the responses too
            ratio = (logs - before).exp()
            gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            kl = (before - logs).exp() - (before - logs) - 1  # k3, never negative
            each = mask * (case.kl * kl - gain)
            if case.mean == "token":
                term = each.sum() / count
            else:  # every row counts equally, whatever its length
                lengths = sum_over(mask.sum(1), cp)
                term = (each.sum(1) / lengths).sum() / (ROWS * case.micro * case.dp)
            term.backward()
            loss += term.detach()
            distance += (mask * kl).detach().sum() / count
        for tensor in (loss, distance, *(weight.grad for weight in model.parameters())):
            sum_over(tensor, group)
        outcome |= {f"loss/{step}": loss, f"tokens/{step}": count.long(), f"metric/{step}/kl": distance}
        outcome |= {f"metric/{step}/mean": mean, f"metric/{step}/spread": spread}
        outcome |= {f"grad/{name}": w.grad.clone() for name, w in model.named_parameters() if step == 0}
        optimizer.step()
    return outcome | {f"param/{name}": weight.detach() for name, weight in model.named_parameters()}


def truth(case, device):
    return train(case, Policy(case), Policy(case, moved=0.1), range(case.dp))


def subject(case, device):
    mesh = dist.init_device_mesh("cpu", (case.dp, case.cp, case.tp), mesh_dim_names=("dp", "cp", "tp"))
    (dp, cp, tp), group = mesh.get_coordinate(), mesh.get_group("tp")
    model, reference = Policy(case, tp, group), Policy(case, tp, group, moved=0.1)
    both = dist.init_device_mesh("cpu", (case.dp * case.cp, case.tp), mesh_dim_names=("dp_cp", "tp"))
    outcome = train(case, model, reference, [dp], cp, mesh.get_group("cp"), both.get_group("dp_cp"))
    for name in ("grad/head", "param/head"):
        outcome[name] = Shard(outcome[name], (model.first, 0), (VOCAB, case.width))
    return outcome


subject.truth, subject.cases = truth, ("tp=2 cp=3 dp=2", "tp=3 cp=2 dp=2 mean=sequence dtype=float32")
subject.words = {"width": 10, "micro": 2, "mean": ("token", "sequence"), "kl": 0.5}
subject.refuses = lambda case: "" if not (VOCAB % case.tp or TOKENS % case.cp) else "tp divides 30, cp 24"
