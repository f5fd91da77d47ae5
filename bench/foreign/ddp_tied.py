"""torch's DistributedDataParallel as people use it: gradients accumulate under no_sync, the head is tied to the
embedding, one layer is frozen. Its truth is the subject on one rank.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Tied(nn.Module):
    def __init__(self, vocab, width):
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.frozen = nn.Linear(width, width)
        self.hidden = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width + 1), nn.ELU())
        self.back = nn.Linear(2 * width + 1, width)
        self.head = nn.Linear(width, vocab)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = x + self.back(self.hidden(torch.tanh(self.frozen(x))))
        return self.head(x)


def subject(case, device):
    dtype = getattr(torch, case.dtype)
    model = Tied(case.vocab, case.width)
    for i, p in enumerate(model.parameters()):
        g = torch.Generator().manual_seed(case.seed % 2**40 + 1000 * i)
        p.data = torch.empty(p.shape, dtype=torch.float64).normal_(0, 0.3, generator=g).to(dtype)
    model.frozen.requires_grad_(False)
    model.embedding.weight.data[0] = 0  # token 0 is the padding token
    ddp = DDP(model, bucket_cap_mb=case.bucket_kb / 1024, gradient_as_bucket_view=case.view)
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, betas=(0.8, 0.95))
    rank, results = dist.get_rank(), {}

    def batch(step, micro):
        rows = []
        for n in case.samples(step, micro, rank, case.rows):
            g = torch.Generator().manual_seed(50_000 + n + case.seed % 2**40)
            rows.append(torch.randint(case.vocab, (case.length + 1,), generator=g))
        rows = torch.stack(rows)
        return rows[:, :-1], rows[:, 1:]

    def loss_of(step, micro):
        tokens, labels = batch(step, micro)
        logits = ddp(tokens)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()) / case.micro

    for step in range(case.steps):
        losses = torch.zeros((), dtype=dtype)
        for micro in range(case.micro - 1):
            with ddp.no_sync():
                loss = loss_of(step, micro)
                loss.backward()
            losses += loss.detach()
        loss = loss_of(step, case.micro - 1)
        loss.backward()
        losses += loss.detach()
        dist.all_reduce(losses)
        results[f"loss/{step}"] = losses / case.dp
        if step == 0:
            for name, p in model.named_parameters():
                if p.requires_grad:
                    results[f"grad/{name}"] = p.grad.clone()
        opt.step()
        opt.zero_grad()
    for name, p in model.named_parameters():
        results[f"param/{name}"] = p.detach()
    return results


subject.truth = "alone"
subject.words = {
    "width": (10, 7, 33),
    "vocab": (23, 17, 301),
    "length": (7, 5, 27),
    "rows": (3, 2),
    "bucket_kb": (1, 25600),
}
subject.words |= {"view": False}
subject.cases = ("dp=2", "dp=3", "dp=4 view=true")
subject.refuses = lambda case: "data parallel" if case.dp != case.world_size else ""
