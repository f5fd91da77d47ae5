"""Training that stops, is saved by torch's DCP and goes on at another layout: AdamW under FSDP2 and a tp plan.

shardproof run "tp=2 dp=3 steps=5 stop=3 then=3" --subject shardproof.suites.subjects.resume:subject

After `stop` steps (0: never) all ranks save. A new model and a new optimizer, with `then` ranks of tp and the others
data ranks, read the folder and go on. The truth never stops. Samples and learning rate depend on the number of steps.
The loss scale doubles after two steps, which changes no gradient: that it is kept shows in its own name alone.
"""

import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import parallel

INNER, ROWS = 24, 3  # features between the linears; samples of a micro-batch


def dense(case):  # the whole model; its weights follow from the seed alone, so they are the same everywhere
    up, down = nn.Linear(case.width, INNER), nn.Linear(INNER, case.width)
    model = nn.Sequential(up, nn.GELU(), down, nn.LayerNorm(case.width))
    for seed, weight in enumerate(model.parameters(), 100 * case.seed):
        draws = torch.Generator().manual_seed(seed)
        weight.data = torch.randn(weight.shape, generator=draws, dtype=torch.float64).mul_(0.3)
    return model.to(getattr(torch, case.dtype))


class Trainer:
    def __init__(self, case, model, dp_ranks, group=None):
        self.case, self.model, self.dp_ranks, self.group = case, model, dp_ranks, group
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        self.progress = {"steps": 0, "scale": 1024.0, "since": 0}  # since: steps since the loss scale grew

    def step(self):
        case, (step, scale, since) = self.case, self.progress.values()
        total = torch.zeros((), dtype=getattr(torch, case.dtype))
        for micro, dp_rank in ((micro, dp_rank) for micro in range(case.micro) for dp_rank in self.dp_ranks):
            draws = torch.Generator().manual_seed(case.samples(step, micro, dp_rank, ROWS).start)
            x = torch.randn(ROWS, case.width, generator=draws, dtype=torch.float64).to(total.dtype)
            loss = (self.model(x) - x.roll(1, 1)).square().mean() / (case.micro * len(self.dp_ranks))
            (loss * scale).backward()
            total += loss.detach()
        if self.group:  # FSDP2 averages the gradients of the data ranks
            dist.all_reduce(total.div_(case.dp), group=self.group)
        for weight in self.model.parameters():
            weight.grad /= scale
        outcome = {f"loss/{step}": total, f"loss_scale/{step}": torch.tensor(scale, dtype=torch.float64)}
        outcome |= {f"grad/{name}": w.grad.clone() for name, w in self.model.named_parameters() if step == 0}
        for settings in self.optimizer.param_groups:
            settings["lr"] = 0.01 / (1 + step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.progress |= {"steps": step + 1, "scale": scale * (1 + since), "since": 1 - since}
        for name, weight in self.model.named_parameters():
            states = self.optimizer.state[weight] | {"param": weight.detach()}
            outcome |= {f"{k}_after/{step}/{name}": states[k].clone() for k in ("param", "exp_avg", "exp_avg_sq")}
        return outcome


def parallelize(case, names):
    mesh, model = dist.init_device_mesh("cpu", (case.dp, case.tp), mesh_dim_names=names), dense(case)
    if case.tp > 1:
        plan = {"0": parallel.ColwiseParallel(), "2": parallel.RowwiseParallel()}
        parallel.parallelize_module(model, mesh[names[1]], plan, src_data_rank=None)
    fully_shard(model, mesh=mesh[names[0]])
    return Trainer(case, model, [mesh.get_local_rank(names[0])], mesh.get_group(names[0]))


def states_of(trainer):
    model, optimizer = get_state_dict(trainer.model, trainer.optimizer)  # a new one has moments of zeros
    return {"model_state_dict": model, "optim_state_dict": optimizer, "progress": trainer.progress}


def load(trainer, folder):
    checkpoint.load(states := states_of(trainer), checkpoint_id=folder)
    trainer.progress |= states.pop("progress")
    set_state_dict(trainer.model, trainer.optimizer, **states)


def subject(case, device):
    outcome, trainer, dp = {}, parallelize(case, ("dp", "tp")), case.world_size // case.then
    for step in range(case.steps):
        if case.stop and step == case.stop:
            with tempfile.TemporaryDirectory() as own:
                dist.broadcast_object_list(folder := [own])
                checkpoint.save(states_of(trainer), checkpoint_id=folder[0])
                after = case.but(tp=case.then, dp=dp, micro=case.micro * case.dp // dp)  # as many samples in a step
                trainer = parallelize(after, ("dp_then", "tp_then"))
                load(trainer, folder[0])
                dist.barrier()
        outcome |= trainer.step()
    return outcome


def truth(case, device):
    trainer = Trainer(case, dense(case), range(case.dp))
    return {name: value for _ in range(case.steps) for name, value in trainer.step().items()}


def refuses(case):
    uneven = case.world_size % case.then or case.micro * case.dp * case.then % case.world_size
    if case.world_size > case.tp * case.dp or case.stop and uneven:
        return "is parallel over tp and dp; then divides the ranks, and the ranks that it leaves divide dp * micro"
    return ""


subject.truth, subject.refuses = truth, refuses
subject.cases = ("tp=2 dp=3 steps=5 stop=3 then=3", "dp=4 steps=3 stop=1 then=2 dtype=float32")
subject.words = {"width": 10, "stop": 0, "then": 1}
