"""DeepSpeed's MoE layer in a network that its engine trains: experts are split over ep, and all else is copied over dp.

shardproof run "dp=4 ep=2 zero=2" --subject shardproof.suites.subjects.deepspeed_moe:subject

Compared with the same mixture in plain torch and one process. No token is dropped and nothing is drawn, so that both
choose the same experts; the balance loss is that of each rank's micro-batch.
"""

import math

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split_params
from deepspeed.utils import safe_get_full_grad
from torch import nn

from shardproof import Shard
from shardproof.suites.subjects import deepspeed as plain

EXPERTS, WIDTH, SHARE = 4, 8, 0.1  # the share of the balance loss in the trained loss
SHAPES = {"moe.gate.weight": (EXPERTS, WIDTH), "head.weight": (5, WIDTH), "head.bias": (5,)}
SHAPES |= {f"moe.experts.{number}.0.weight": (12, WIDTH) for number in range(EXPERTS)}
SHAPES |= {f"moe.experts.{number}.2.weight": (WIDTH, 12) for number in range(EXPERTS)}


def draw_weights(case):  # the whole weights, the same on every rank
    draws = torch.Generator().manual_seed(case.seed)
    whole = {name: torch.randn(shape, generator=draws, dtype=torch.float64) for name, shape in SHAPES.items()}
    return {name: (weight * 0.4).to(getattr(torch, case.dtype)) for name, weight in whole.items()}


def sample(case, step, micro, dp_rank):
    numbers = case.samples(step, micro, dp_rank, 6)  # 6 samples of one token each
    draws = torch.Generator().manual_seed(numbers.start)
    x = torch.randn(6, WIDTH, generator=draws, dtype=torch.float64).to(getattr(torch, case.dtype))
    return x, torch.tensor(numbers) % 5


def truth(case, device):
    w, outcome = {name: weight.requires_grad_() for name, weight in draw_weights(case).items()}, {}
    optimizer = torch.optim.SGD(w.values(), lr=0.1)
    for step in range(case.steps):
        optimizer.zero_grad()
        outcome[f"loss/{step}"] = torch.zeros((), dtype=w["head.bias"].dtype)
        for micro, dp_rank in ((micro, dp_rank) for micro in range(case.micro) for dp_rank in range(case.dp)):
            x, labels = sample(case, step, micro, dp_rank)
            gates = (x @ w["moe.gate.weight"].T).softmax(-1)  # [tokens, experts]
            best, chosen = gates.topk(case.k)
            y = torch.zeros_like(x)
            for number in range(EXPERTS):
                up, down = (w[f"moe.experts.{number}.{place}.weight"] for place in (0, 2))
                share = (best / (best.sum(-1, keepdim=True) if case.k > 1 else 1) * (chosen == number)).sum(-1)
                y = y + share[:, None] * (nn.functional.gelu(x @ up.T) @ down.T)
            first = nn.functional.one_hot(chosen[:, 0], EXPERTS).to(x.dtype).mean(0)  # tokens by their best expert
            logits = (x + y) @ w["head.weight"].T + w["head.bias"]
            loss = nn.functional.cross_entropy(logits, labels) + SHARE * EXPERTS * (gates.mean(0) * first).sum()
            (loss := loss / (case.micro * case.dp)).backward()
            outcome[f"loss/{step}"] += loss.detach()
        outcome |= {f"grad/{name}": weight.grad.clone() for name, weight in w.items() if step == 0}
        nn.utils.clip_grad_norm_(w.values(), case.clip or math.inf)
        optimizer.step()
    return outcome | {f"param/{name}": weight.detach() for name, weight in w.items()}


class Network(nn.Module):
    """A mixture of experts with a residual connection, then a linear layer; returns the loss of x [tokens, width]."""

    def __init__(self, case):
        super().__init__()
        expert = nn.Sequential(nn.Linear(WIDTH, 12, bias=False), nn.GELU(), nn.Linear(12, WIDTH, bias=False))
        words = {"drop_tokens": False, "use_rts": False, "top2_2nd_expert_sampling": False, "min_capacity": 0}
        self.moe = MoE(WIDTH, expert, EXPERTS, ep_size=case.ep, k=case.k, **words)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x, labels):
        """Its cross entropy and the balance loss of its experts."""
        y, balance, _ = self.moe(x)
        return nn.functional.cross_entropy(self.head(x + y), labels) + SHARE * balance


def name_parameters(case, network):  # an expert by its number among all; ranks of ep are neighbours
    first = torch.distributed.get_rank() % case.ep * (EXPERTS // case.ep)
    for name, weight in network.named_parameters():
        words = name.replace("deepspeed_moe.gate.wg", "gate").replace("deepspeed_moe.experts.deepspeed_", "").split(".")
        if "experts" in words:
            words[2] = str(first + int(words[2]))
        yield ".".join(words), weight


def place_shard(name, tensor):  # an expert is not split, but not all ranks have it
    return Shard(tensor, (0, 0), SHAPES[name]) if "experts" in name else tensor


def subject(case, device):
    network, whole, outcome = Network(case).to(getattr(torch, case.dtype)), draw_weights(case), {}
    for name, weight in name_parameters(case, network):
        weight.data.copy_(whole[name])
    groups = split_params({"params": list(network.parameters()), "name": "all"})
    config = {"train_micro_batch_size_per_gpu": 6, "gradient_accumulation_steps": case.micro}
    config |= {"zero_optimization": {"stage": case.zero}, "gradient_clipping": case.clip}
    config |= {"zero_allow_untested_optimizer": True}
    engine, *_ = deepspeed.initialize(None, network, torch.optim.SGD(groups, lr=0.1), config=config)
    for step in range(case.steps):
        outcome[f"loss/{step}"] = total = torch.zeros((), dtype=getattr(torch, case.dtype))
        for micro in range(case.micro):
            engine.backward(loss := engine(*sample(case, step, micro, torch.distributed.get_rank())))
            total += loss.detach() / (case.micro * case.dp)
            found = name_parameters(case, network) if (step, micro) == (0, case.micro - 1) else ()
            outcome |= {f"grad/{name}": place_shard(name, safe_get_full_grad(weight).clone()) for name, weight in found}
            engine.step()
        torch.distributed.all_reduce(total)
    return outcome | {f"param/{name}": place_shard(name, p.detach()) for name, p in name_parameters(case, network)}


subject.truth, subject.per_rank = truth, plain.subject.per_rank
subject.words = {"ep": 1, "etp": 1, "k": (1, 2), "micro": 2, "zero": (1, 0, 2), "clip": 0.0, "dtype": "float32"}
subject.cases, subject.refuses = ("dp=4 ep=2", "dp=2 ep=2 k=2 zero=2"), plain.subject.refuses
