"""A network trained by DeepSpeed's ZeRO over dp, compared with the same network in one process. Needs deepspeed.
shardproof calls `subject` on every rank, and `truth` once in float64. Their results are compared name by name."""

import os

os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": os.environ.get("LOCAL_RANK", "0")}  # what its launcher sets

import deepspeed
import torch
from torch import nn

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else an operator is compiled, for minutes


def dense(case):  # the whole model; its weights follow from the seed alone, so they are the same everywhere
    torch.manual_seed(case.seed)
    model = nn.Sequential(nn.Linear(case.width, 12), nn.GELU(), nn.Linear(12, 7)).to(getattr(torch, case.dtype))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def loss_of(case, model, step, micro, dp_rank):
    numbers = case.samples(step, micro, dp_rank, 5)  # 5 samples, the same in no other micro-batch, rank or step
    x = torch.randn(5, case.width, generator=torch.Generator().manual_seed(numbers.start))
    return nn.functional.cross_entropy(model(x.to(getattr(torch, case.dtype))), torch.tensor(numbers) % 7)


def truth(case, device):
    (model, optimizer), outcome = dense(case), {}
    for step in range(case.steps):
        places = [(step, micro, dp_rank) for micro in range(case.micro) for dp_rank in range(case.dp)]
        outcome[f"loss/{step}"] = loss = sum(loss_of(case, model, *place) for place in places) / len(places)
        optimizer.zero_grad()
        loss.backward()
        outcome |= {f"grad/{name}": w.grad.clone() for name, w in model.named_parameters() if step == 0}
        optimizer.step()
    return outcome | {f"param/{name}": weight for name, weight in model.named_parameters()}


def subject(case, device):
    (model, optimizer), outcome, dp_rank = dense(case), {}, torch.distributed.get_rank()
    config = {"gradient_accumulation_steps": case.micro, "zero_optimization": {"stage": case.zero}}
    engine, *_ = deepspeed.initialize(None, model, optimizer, config=config | {"train_micro_batch_size_per_gpu": 5})
    for step in range(case.steps):
        outcome[f"loss/{step}"] = total = torch.zeros((), dtype=getattr(torch, case.dtype))
        for micro in range(case.micro):
            engine.backward(loss := loss_of(case, engine, step, micro, dp_rank))  # DeepSpeed divides it by case.micro
            total += loss.detach() / (case.micro * case.dp)
            found = model.named_parameters() if (step, micro) == (0, case.micro - 1) else ()
            outcome |= {f"grad/{name}": deepspeed.utils.safe_get_full_grad(weight) for name, weight in found}
            engine.step()  # DeepSpeed does nothing before the last micro-batch
        torch.distributed.all_reduce(total)
    whole = deepspeed.utils.safe_get_full_fp32_param if case.zero == 3 else torch.clone  # 3 keeps parts
    return outcome | {f"param/{name}": whole(weight) for name, weight in model.named_parameters()}


subject.truth, subject.cases = truth, ("dp=2", "dp=3 zero=1 micro=2")  # what runs when no case is named
subject.words = {"width": 10, "micro": 3, "zero": (2, 1, 0, 3), "dtype": "float32"}  # float16 overflows without a GPU
states = ("comm.comm", "utils.groups", "runtime.zero.parameter_offload", "runtime.zero.partition_parameters")
subject.per_rank = tuple(f"deepspeed.{name}" for name in states)  # modules whose variables are each rank's own
subject.refuses = lambda case: "is dp without float16" if case.world_size > case.dp or case.dtype == "float16" else ""
