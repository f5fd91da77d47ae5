"""A gated delta rule (linear attention with a state) behind a short convolution, under tp, cp and dp, on packed rows.

shardproof run "tp=2 cp=3 dp=2" --subject shardproof.suites.subjects.mixer:subject

Heads are split over tp, rows over cp. A rank of cp begins with the state that the parts before its own leave: each part
maps S -> S M + N. No state and no tap of the convolution crosses a document's border.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from shardproof import Shard, documents
from shardproof.suites.subjects.regions import collect, enter, leave

D, TOKENS, VOCAB = 4, 24, 20  # features of a head, tokens of a row


class Convolution(nn.Module):  # [rows, tokens, heads, 3 D], each feature over 3 tokens of its document
    def forward(self, x, last):
        before = torch.zeros_like(x[:, -2:])
        if self.cp:  # the last two tokens of the rank before
            tails = collect(x[:, -2:], self.cp)
            before = tails[self.cp.rank() - 1] * (self.cp.rank() > 0)  # zeros of rank 0, which takes part all the same
        x, taps = torch.cat((before, x), 1), 0
        for back in range(3):
            same = (last[..., 2 - back] == last[..., 2])[..., None, None]
            taps = taps + x[:, 2 - back : x.shape[1] - back] * self.taps[..., back] * same
        return functional.silu(taps)


class Scan(nn.Module):  # S <- keep S (1 - rate k k') + rate v k', of which a token reads S q
    def forward(self, q, k, v, keep, rate):
        one = torch.eye(D, dtype=q.dtype)
        change = keep[..., None, None] * (one - rate[..., None, None] * k[..., :, None] * k[..., None, :])
        added = (rate[..., None] * v)[..., :, None] * k[..., None, :]
        state, product, states, products = torch.zeros_like(added[:, 0]), one.expand_as(added[:, 0]), [], []
        for token in range(q.shape[1]):
            state, product = state @ change[:, token] + added[:, token], product @ change[:, token]
            states, products = [*states, state], [*products, product]
        states, products = torch.stack(states, 1), torch.stack(products, 1)
        if self.cp:
            ends = collect(torch.stack((state, product)), self.cp)
            begin = 0 * ends[0, 0]
            for before in range(self.cp.rank()):
                begin = begin @ ends[before, 1] + ends[before, 0]
            states = states + begin[:, None] @ products
        return (states @ q[..., None]).squeeze(-1)


class Mixer(nn.Module):
    def __init__(self, case, heads, tp=None, cp=None):  # these heads, a slice
        super().__init__()
        self.tp, self.convolution, self.scan = tp, Convolution(), Scan()
        self.convolution.cp = self.scan.cp = cp
        self.embed, self.head = nn.Embedding(VOCAB, case.width), nn.Linear(case.width, VOCAB, bias=False)
        whole = {"embed.weight": (VOCAB, case.width), "head.weight": (VOCAB, case.width)}
        split = {"project": (3 * D + 2, case.width), "convolution.taps": (3 * D, 3), "out": (D, case.width)}
        split = {name: (case.heads, *shape) for name, shape in split.items()}
        for seed, (name, shape) in enumerate((whole | split).items(), 100 * case.seed):
            weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 0.4
            part = (weight if name in whole else weight[heads]).to(getattr(torch, case.dtype))
            setattr(self.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], nn.Parameter(part.clone()))

    def forward(self, tokens, numbers):  # the documents of these tokens, and of the two tokens before them
        last, own = numbers.unfold(1, 3, 1), numbers[:, 2:]
        x = documents(self.embed(tokens), own)
        mixed = torch.einsum("btw,hfw->bthf", enter(x, self.tp), self.project)
        q, k, v = self.convolution(mixed[..., : 3 * D], last).chunk(3, -1)
        keep, rate = mixed[..., 3 * D :].sigmoid().unbind(-1)
        keep = keep * (last[..., 2] == last[..., 1])[..., None]  # nothing of another document
        y = self.scan(q, functional.normalize(k, dim=-1), v, keep, rate)
        x = x + leave(torch.einsum("bthd,hdw->btw", y, self.out), self.tp)
        return self.head(documents(x, own))


def draw_row(number):  # tokens, labels, and the document of every token and of the two before the first
    draws = torch.Generator().manual_seed(number)
    first = torch.rand(TOKENS, generator=draws) < 0.2
    tokens, labels = torch.randint(VOCAB, (2, TOKENS), generator=draws)
    return tokens, labels, functional.pad(100 * number + first.long().cumsum(0), (2, 0), value=-1)


def train(case, model, dp_ranks, part=0, group=None):
    outcome, optimizer, size = {}, torch.optim.AdamW(model.parameters(), lr=0.01), TOKENS // (case.cp if group else 1)
    for step in range(case.steps):
        optimizer.zero_grad()
        outcome[f"loss/{step}"] = total = torch.zeros((), dtype=getattr(torch, case.dtype))
        for micro, dp_rank in ((micro, dp_rank) for micro in range(case.micro) for dp_rank in dp_ranks):
            rows = [draw_row(number) for number in case.samples(step, micro, dp_rank, 2)]
            tokens, labels, numbers = (torch.stack(each)[:, part * size :] for each in zip(*rows, strict=True))
            logits = model(tokens[:, :size], numbers[:, : size + 2])
            loss = functional.cross_entropy(logits.flatten(0, 1), labels[:, :size].flatten(), reduction="sum")
            (loss := loss / (2 * TOKENS * case.micro * case.dp)).backward()
            total += loss.detach()
        for tensor in (total, *(weight.grad for weight in model.parameters())) if group else ():
            dist.all_reduce(tensor, group=group)
        outcome |= {f"grad/{name}": w.grad.clone() for name, w in model.named_parameters() if step == 0}
        optimizer.step()
    return outcome | {f"param/{name}": weight.detach() for name, weight in model.named_parameters()}


def subject(case, device):
    mesh = dist.init_device_mesh("cpu", (case.dp, case.cp, case.tp), mesh_dim_names=("dp", "cp", "tp"))
    heads, (dp, cp, tp) = case.heads // case.tp, mesh.get_coordinate()
    model = Mixer(case, slice(tp * heads, (tp + 1) * heads), mesh.get_group("tp"), mesh.get_group("cp"))
    flat = dist.init_device_mesh("cpu", (case.dp * case.cp, case.tp), mesh_dim_names=("dp_cp", "tp"))
    outcome = train(case, model, [dp], cp, flat.get_group("dp_cp"))
    for name in (name for name in outcome if name.endswith(("project", "taps", "out"))):  # split by heads
        local = outcome[name]
        outcome[name] = Shard(local, (tp * heads, 0, 0), (case.heads, *local.shape[1:]))
    return outcome


subject.truth = lambda case, device: train(case, Mixer(case, slice(None)), range(case.dp))
subject.cases = ("tp=2 cp=3", "tp=3 cp=2 dp=2 dtype=float32")
subject.words = {"width": 10, "heads": 6, "micro": 2}
subject.refuses = lambda case: "" if not (case.heads % case.tp or TOKENS % case.cp) else "tp divides heads, cp 24"
