"""An attention layer whose sequence is split over cp by torch's context_parallel, compared with it in one process.

shardproof run "cp=2" --subject shardproof.suites.subjects.context:subject
"""

from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import functional


def causal(q, k, v, *_):  # [rows, sequence, heads, features]; context_parallel replaces torch's function
    heads = (one.transpose(1, 2) for one in (q, k, v))
    return functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2)


class AttentionModel(nn.Module):
    """Causal attention of 12 heads of 4 features between two linear layers."""

    def __init__(self, case, attention=causal):
        super().__init__()
        self.qkv, self.out, self.attention = nn.Linear(case.width, 144), nn.Linear(48, 40), attention
        for seed, weight in enumerate(self.parameters(), 100 * case.seed):
            nn.init.normal_(weight, std=0.3, generator=torch.Generator().manual_seed(seed))
        self.to(getattr(torch, case.dtype))

    def forward(self, x):
        """x [rows, part of the sequence, width] to logits."""
        q, k, v = (one.contiguous() for one in self.qkv(x).unflatten(-1, (3, 12, 4)).unbind(2))
        return self.out(self.attention(q, k, v, 0).flatten(2))


def train(case, model, dp_ranks, part=lambda x, labels: nullcontext((x, labels)), group=None):
    outcome, optimizer = {}, torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(case.steps):
        optimizer.zero_grad()
        outcome[f"loss/{step}"] = total = torch.zeros((), dtype=getattr(torch, case.dtype))
        for micro, dp_rank in ((micro, dp_rank) for micro in range(case.micro) for dp_rank in dp_ranks):
            first = case.samples(step, micro, dp_rank, 2).start  # the number of the first of 2 samples
            draws = torch.Generator().manual_seed(first)
            x, labels = torch.randn(2, 24, case.width, generator=draws), torch.randint(40, (2, 24), generator=draws)
            with part(x.to(total.dtype), labels) as (x, labels):
                loss = functional.cross_entropy(model(x).flatten(0, 1), labels.flatten()) / (case.micro * case.dp)
                loss = loss / case.cp if group else loss  # a part of the mean over the whole step
                loss.backward()
            total += loss.detach()
        for tensor in (total, *(weight.grad for weight in model.parameters())) if group else ():
            dist.all_reduce(tensor, group=group)
        outcome |= {f"grad/{name}": w.grad.clone() for name, w in model.named_parameters() if step == 0}
        optimizer.step()
    return outcome | {f"param/{name}": weight.detach() for name, weight in model.named_parameters()}


def truth(case, device):
    return train(case, AttentionModel(case), range(case.dp))


def subject(case, device):
    mesh = dist.init_device_mesh("cpu", (case.dp, case.cp), mesh_dim_names=("dp", "cp"))

    @contextmanager
    def part(x, labels):  # cut along the sequence in place, and whole again afterwards
        with context_parallel(mesh["cp"], buffers=[x, labels], buffer_seq_dims=[1, 1]):
            yield x, labels

    return train(case, AttentionModel(case), [mesh.get_local_rank("dp")], part, dist.group.WORLD)


subject.truth, subject.cases = truth, ("cp=2", "cp=3 dp=2 dtype=float32")
subject.words = {"width": 10, "micro": 2}
subject.refuses = lambda case: "is parallel over cp and dp" if case.world_size > case.cp * case.dp else ""
