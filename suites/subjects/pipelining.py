"""A network in stages of torch.distributed.pipelining, compared with the same network in one process.
shardproof calls `subject` on every rank, and `truth` once in float64. Their results are compared name by name."""

import torch
from torch import nn
from torch.distributed import pipelining
from torch.nn.functional import cross_entropy

from shardproof import Shard


def dense(case):  # the whole model, the same everywhere: its weights follow from the seed alone
    layers = (nn.Linear(case.width, case.width) for _ in range(case.pp * case.layers))
    model = nn.Sequential(*(nn.Sequential(layer, nn.LayerNorm(case.width)) for layer in layers))
    for seed, weight in enumerate(model.parameters(), 100 * case.seed):
        nn.init.normal_(weight, std=0.3, generator=torch.Generator().manual_seed(seed))
    return model.to(getattr(torch, case.dtype))


def train(case, model, forward_backward):
    outcome, optimizer = {}, torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(case.steps):
        optimizer.zero_grad()
        x = torch.randn(5 * case.micro, case.width, generator=torch.Generator().manual_seed(step))
        loss = forward_backward(x.to(getattr(torch, case.dtype)), torch.arange(len(x)) % case.width)
        outcome |= {} if loss is None else {f"loss/{step}": loss.detach()}  # only the last stage knows the loss
        outcome |= {f"grad/{name}": w.grad.clone() for name, w in model.named_parameters() if step == 0}
        optimizer.step()
    return outcome | {f"param/{name}": weight.detach() for name, weight in model.named_parameters()}


def truth(case, device):
    def forward_backward(x, labels):
        loss = cross_entropy(model(x), labels)
        loss.backward()
        return loss

    model = dense(case)
    return train(case, model, forward_backward)


def subject(case, device):
    def forward_backward(x, labels):
        inputs, losses = [x] if stage.is_first else [], []  # `losses` gets the loss of every micro-batch
        schedule.step(*inputs, target=labels if stage.is_last else None, losses=losses)
        return torch.stack(losses).mean() if losses else None

    rank, model = torch.distributed.get_rank(), dense(case)
    for number in (number for number in range(len(model)) if number // case.layers != rank):
        delattr(model, str(number))  # drop the layers of other stages; those that stay keep their names
    stage = pipelining.PipelineStage(model, rank, case.pp, torch.device(device))
    schedule = getattr(pipelining, f"Schedule{case.schedule}")(stage, case.micro, loss_fn=cross_entropy)
    outcome = train(case, model, forward_backward)  # what only one stage has is returned as a shard of full size
    return {name: Shard(tensor, (0,) * tensor.dim(), tuple(tensor.shape)) for name, tensor in outcome.items()}


subject.truth, subject.cases = truth, ("pp=2", "pp=4 schedule=GPipe dtype=float32")  # what runs when no case is named
subject.words = {"width": 10, "layers": 2, "micro": 4, "schedule": ("1F1B", "GPipe")}  # beside pp, steps, dtype, seed
subject.refuses = lambda case: "" if case.world_size <= min(case.pp, case.micro) else "needs micro >= pp, no other axis"
