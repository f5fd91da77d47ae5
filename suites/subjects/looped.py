"""The network of `pipelining`, two stages a rank, under torch's looped and zero-bubble schedules.

shardproof run "pp=2 schedule=DualPipeV" --subject shardproof.suites.subjects.looped:subject
"""

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn.functional import cross_entropy

from shardproof import Shard
from shardproof.suites.subjects import pipelining

FOLDED = ("ZBVZeroBubble", "DualPipeV")  # the second stages of their ranks lie in reverse order


def subject(case, device):
    rank, model = torch.distributed.get_rank(), pipelining.dense(case)
    numbers = [rank, 2 * case.pp - 1 - rank if case.schedule in FOLDED else case.pp + rank]
    kept = nn.ModuleDict({str(number): model[number] for number in numbers})
    stages = [PipelineStage(kept[str(n)], n, 2 * case.pp, torch.device(device)) for n in numbers]
    schedule = getattr(schedules, f"Schedule{case.schedule}")(stages, case.micro, loss_fn=cross_entropy)
    last = any(stage.is_last for stage in stages)

    def forward_backward(x, labels):
        inputs, losses = [x] if rank == 0 else [], []  # `losses` gets the loss of every micro-batch
        schedule.step(*inputs, target=labels if last else None, losses=losses)
        return torch.stack(losses).mean() if losses else None

    outcome = pipelining.train(case, kept, forward_backward)
    return {name: Shard(tensor, (0,) * tensor.dim(), tuple(tensor.shape)) for name, tensor in outcome.items()}


names = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", *FOLDED)
subject.truth, subject.cases = pipelining.truth, ("pp=2", "pp=2 schedule=DualPipeV")
subject.words = {"width": 10, "layers": (2,), "micro": 4, "schedule": names}
subject.refuses = lambda case: "" if case.world_size <= min(case.pp, case.micro) else "needs micro >= pp, no other axis"
