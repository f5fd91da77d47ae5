"""An MLP split over tp and trained over dp, with torch's own dropout, compared with the same MLP in one process.

No mask is returned: shardproof records what nn.Dropout draws on every rank, and the truth drops the same.
"""

from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardproof import Shard
from shardproof.suites.subjects.mlp import train


@contextmanager
def stream(tp_rank):  # of what is split over tp: seeded by the default stream, which recomputation restores
    seed = int(torch.randint(2**31, ()))
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed + tp_rank)
        yield


class DropoutMlp(nn.Module):
    """Two linear layers without biases, dropout behind the activation and behind the sum over tp."""

    def __init__(self, case, tp_rank=0, tp=1, group=None):
        super().__init__()
        generator, rows = torch.Generator().manual_seed(case.seed), slice(tp_rank * 24 // tp, (tp_rank + 1) * 24 // tp)
        up, down = torch.randn(2, 24, case.width, generator=generator).mul(0.3).to(getattr(torch, case.dtype))
        self.up, self.down = nn.Parameter(up[rows].clone()), nn.Parameter(down[rows].T.contiguous())
        self.inner, self.outer = nn.Dropout(case.dropout), nn.Dropout(case.dropout)
        self.tp_rank, self.group, self.recompute = tp_rank, group, case.recompute

    def forward(self, x):
        """x [rows, width] to the output of the layers minus x."""
        return (checkpoint(self.layers, x, use_reentrant=False) if self.recompute else self.layers(x)) - x

    def layers(self, x):
        """x [rows, width] to the same shape."""
        with stream(self.tp_rank):
            hidden = self.inner(torch.nn.functional.gelu(x @ self.up.T))
        y = hidden @ self.down.T
        if self.group:  # summed in place, unseen by autograd: the gradient of a sum is that of each of its terms
            dist.all_reduce(y.detach(), group=self.group)
        return self.outer(y)


def truth(case, device):
    return train(case, DropoutMlp(case), range(case.dp))


def subject(case, device):
    mesh = dist.init_device_mesh("cpu", (case.dp, case.tp), mesh_dim_names=("dp", "tp"))
    tp_rank, dp_rank = mesh.get_local_rank("tp"), mesh.get_local_rank("dp")
    torch.manual_seed(case.seed + 10 * dp_rank)  # equal where activations are whole: on all ranks of tp
    outcome = train(case, DropoutMlp(case, tp_rank, case.tp, mesh.get_group("tp")), [dp_rank], mesh.get_group("dp"))
    for kind in ("grad", "param"):  # a part of a tensor is returned with its offsets and the full shape
        first = tp_rank * 24 // case.tp
        outcome[f"{kind}/up"] = Shard(outcome[f"{kind}/up"], (first, 0), (24, case.width))
        outcome[f"{kind}/down"] = Shard(outcome[f"{kind}/down"], (0, first), (case.width, 24))
    return outcome


subject.truth, subject.cases = truth, ("tp=2 dp=3", "tp=4 recompute=true dtype=float32")
subject.words = {"width": 12, "dropout": 0.3, "recompute": False, "micro": 3}
subject.refuses = lambda case: "24 must be a multiple of tp" if 24 % case.tp else ""
