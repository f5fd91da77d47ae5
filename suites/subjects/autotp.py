"""The Llama of `hf` split over tp by DeepSpeed's AutoTP and trained by its ZeRO, compared with it in one process.

shardproof run "tp=2 dp=2 zero=1" --subject shardproof.suites.subjects.autotp:subject
"""

import deepspeed
import torch
from deepspeed.module_inject.layers import LinearAllreduce, LinearLayer

from shardproof import Shard
from shardproof.suites.subjects import deepspeed as zero
from shardproof.suites.subjects import hf


def loss_of(case, model, step, micro, dp_rank):
    first = case.samples(step, micro, dp_rank, 3).start  # the number of the first of 3 samples
    tokens = torch.randint(1, 96, (3, 13), generator=torch.Generator().manual_seed(first))
    logits = model(input_ids=tokens[:, :-1]).logits.flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())


def place_shard(case, model, name, tensor, tp_rank):  # a part is returned with its offsets and the full shape
    layer = model.get_submodule(name.rpartition(".")[0])
    dim = 0 if isinstance(layer, LinearLayer) else 1 if isinstance(layer, LinearAllreduce) else None
    if dim is None or case.tp == 1:
        return tensor
    offsets, shape = [0] * tensor.dim(), list(tensor.shape)
    offsets[dim], shape[dim] = tp_rank * shape[dim], case.tp * shape[dim]
    return Shard(tensor, tuple(offsets), tuple(shape))


def subject(case, device):
    rank, outcome, model = torch.distributed.get_rank(), {}, hf.dense(case)
    tp_rank, dp_rank = case.axis_rank("tp", rank), case.axis_rank("dp", rank)
    config = {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": case.micro}
    config |= {"zero_optimization": {"stage": case.zero}, "tensor_parallel": {"autotp_size": case.tp}}
    config |= {"optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}}
    engine, *_ = deepspeed.initialize(model=model, config=config)
    for step in range(case.steps):
        outcome[f"loss/{step}"] = total = torch.zeros((), dtype=getattr(torch, case.dtype))
        for micro in range(case.micro):
            loss = loss_of(case, engine, step, micro, dp_rank)
            engine.backward(loss)  # DeepSpeed divides it by the number of micro-batches
            total += loss.detach() / (case.micro * case.world_size)
            for name, weight in model.named_parameters() if (step, micro) == (0, case.micro - 1) else ():
                gradient = deepspeed.utils.safe_get_full_grad(weight)
                outcome[f"grad/{name}"] = place_shard(case, model, name, gradient, tp_rank)
            engine.step()  # DeepSpeed does nothing before the last micro-batch
        torch.distributed.all_reduce(total)
    weights = model.named_parameters()
    return outcome | {f"param/{name}": place_shard(case, model, name, weight.data, tp_rank) for name, weight in weights}


def truth(case, device):
    model, outcome = hf.dense(case), {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(case.steps):
        places = [(step, micro, dp_rank) for micro in range(case.micro) for dp_rank in range(case.dp)]
        outcome[f"loss/{step}"] = loss = sum(loss_of(case, model, *place) for place in places) / len(places)
        optimizer.zero_grad()
        loss.backward()
        outcome |= {f"grad/{name}": w.grad.clone() for name, w in model.named_parameters() if step == 0}
        optimizer.step()
    return outcome | {f"param/{name}": weight for name, weight in model.named_parameters()}


subject.truth, subject.cases = truth, ("tp=2", "tp=2 dp=2 zero=1")
subject.words = {"kind": "llama", "tied": False, "experts": 0, "micro": 2, "zero": (0, 1, 2), "dtype": "float32"}
subject.per_rank = (*zero.subject.per_rank, "deepspeed.runtime.tensor_parallel.init_utils")
subject.refuses = lambda case: "" if case.world_size == case.tp * case.dp else "is parallel over tp and dp"
