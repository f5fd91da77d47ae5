"""Zero-bubble pipelines: torch's schedules that compute the gradients of weights by themselves, over data ranks.

shardproof run "pp=2 dp=3 schedule=ZBVZeroBubble" --subject shardproof.suites.subjects.split_backward:subject

The table of tokens is the head too. Where one rank has both ends of the model (a V) it is one tensor, else there are
two, whose gradients are summed over both ranks. A layer is applied twice, so its weights have two gradients. A split
backward calls no hooks, so gradients are summed over dp once all are there; `ddp=true` leaves that to torch's DDP. A
schedule divides by the micro-batches stage by stage: the loss does it here, for a tensor in two stages.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn.functional import cross_entropy, linear
from torch.nn.parallel import DistributedDataParallel

from shardproof import Shard

FOLDED = ("ZBVZeroBubble", "DualPipeV")  # the second stages of their ranks lie in reverse order
TOKENS, VOCAB = 5, 11


def draw(case, seed, *shape):  # numbers follow from the seeds alone, so they are the same everywhere
    draws = torch.Generator().manual_seed(1000 * case.seed + seed)
    weight = torch.randn(shape, generator=draws, dtype=torch.float64) * 0.3
    return nn.Parameter(weight.to(getattr(torch, case.dtype)))


class Stage(nn.Module):
    def __init__(self, case, layers, table):
        super().__init__()
        self.layers, self.first, self.last = nn.ModuleDict(), 0 in layers, case.layers - 1 in layers
        self.table = table if self.first or self.last else None
        for number in layers:
            self.layers[str(number)] = layer = nn.Linear(case.width, case.width)
            layer.weight, layer.bias = (draw(case, 2 * number + n, *[case.width] * n) for n in (2, 1))

    def forward(self, x):
        x = self.table[x] if self.first else x
        for layer in self.layers.values():
            for _use in range(2):
                x = x + torch.tanh(layer(x))
        return linear(x, self.table) if self.last else x


def build(case, numbers, stages):  # number -> stage, of so many stages; both ends have one table
    table, size = draw(case, 0, VOCAB, case.width), case.layers // stages
    return {number: Stage(case, range(number * size, (number + 1) * size), table) for number in numbers}


def train(case, stages, dp_ranks, forward_backward):
    weights = {name: weight for stage in stages.values() for name, weight in stage.named_parameters()}
    outcome, optimizer = {}, torch.optim.AdamW(weights.values(), lr=0.01)
    for step in range(case.steps):
        optimizer.zero_grad()
        numbers = [case.samples(step, micro, dp, 2) for micro in range(case.micro) for dp in dp_ranks]
        draws = [torch.Generator().manual_seed(number) for each in numbers for number in each]
        tokens = torch.stack([torch.randint(VOCAB, (TOKENS + 1,), generator=one) for one in draws])
        loss = forward_backward(tokens[:, :-1], tokens[:, 1:], weights)
        outcome |= {} if loss is None else {f"loss/{step}": loss}  # the last stage alone knows it
        outcome |= {f"grad/{name}": w.grad.clone() for name, w in weights.items() if step == 0}
        optimizer.step()
    return outcome | {f"param/{name}": weight.detach() for name, weight in weights.items()}


def loss_of(logits, labels):
    return cross_entropy(logits.flatten(0, 1), labels.flatten())


def truth(case, device):
    def forward_backward(x, labels, weights):
        (loss := loss_of(stage[0](x), labels)).backward()
        return loss.detach()

    return train(case, stage := build(case, [0], 1), range(case.dp), forward_backward)


def subject(case, device):
    mesh = dist.init_device_mesh("cpu", (case.pp, case.dp), mesh_dim_names=("pp", "dp"))
    (rank, dp_rank), dp, count = mesh.get_coordinate(), mesh.get_group("dp"), 2 * case.pp
    folded = case.schedule in FOLDED
    stages = build(case, [rank, count - 1 - rank if folded else case.pp + rank], count)
    last, share, pp = count - 1 in stages, case.micro * case.dp, mesh.get_group("pp")
    wrapped = {n: DistributedDataParallel(one, process_group=dp) if case.ddp else one for n, one in stages.items()}
    parts = [PipelineStage(one, number, count, device, group=pp) for number, one in wrapped.items()]
    words = {"loss_fn": lambda *each: loss_of(*each) / share, "scale_grads": False}
    schedule = getattr(schedules, f"Schedule{case.schedule}")(parts, case.micro, **words)
    both = [[data, (case.pp - 1) * case.dp + data] for data in range(case.dp)]
    ends = None if folded else dist.new_subgroups_by_enumeration(both)[0]

    def forward_backward(x, labels, weights):
        losses = []
        schedule.step(*([] if rank else [x]), target=labels if last else None, losses=losses)
        if ends and "table" in weights:
            dist.all_reduce(weights["table"].grad, group=ends)
        for weight in () if case.ddp else weights.values():
            dist.all_reduce(weight.grad, group=dp)
        if losses:
            dist.all_reduce(total := torch.stack(losses).sum().detach(), group=dp)
        return total if losses else None

    outcome = train(case, stages, [dp_rank], forward_backward)
    return {name: Shard(tensor, (0,) * tensor.dim(), tuple(tensor.shape)) for name, tensor in outcome.items()}


def refuses(case):
    fits = case.world_size == case.pp * case.dp and case.pp > 1 and not case.layers % (2 * case.pp)
    fits = fits and case.micro >= 2 * case.pp
    return "" if fits else "needs pp, 2 pp stages of layers, micro >= 2 pp, and dp alone beside it"


subject.truth, subject.refuses = truth, refuses
subject.cases = ("pp=2 dp=3", "pp=2 schedule=ZBVZeroBubble dtype=float32")
subject.words = {"width": 6, "layers": 4, "micro": 4, "schedule": ("InterleavedZeroBubble", *FOLDED), "ddp": False}
