"""Data ranks that send gradients as int8 and gather weights as fp8, a scale a block: an MLP over tp and dp, sharded.

shardproof run "tp=2 dp=3" --subject shardproof.suites.subjects.quantised:subject

As in ZeRO++: ranks exchange quantised rows of their gradients, and each adds up those that it owns in the case's dtype.
What int8 loses of a gradient is added to that of the next step (`feedback`). Owners step and gather the weights again.
A block lies within a row and ranks hold whole rows, so fp8 weights are the same in every layout. The sum of rounded
gradients depends on the number of data ranks. That is intended, and the truth does it too: it applies `round_trip` to
the gradient of each data rank. So float64 keeps its limits, and no wider limit hides a wrong scale.
"""

from functools import partial

import torch
import torch.distributed as dist
from torch.nn.functional import gelu

from shardproof import Shard, Term, phase
from shardproof.suites.subjects.one_byte import gather_weights, reduce_gradient, round_trip
from shardproof.suites.subjects.regions import enter, leave

INNER, ROWS = 12, 5  # hidden features, which tp and dp share out; samples of a micro-batch


def differentiate(case, weights, step, dp_rank, tp):  # loss and gradients of one data rank
    total = torch.zeros((), dtype=weights["up"].dtype)
    leaves = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    for micro in range(case.micro):
        draws = torch.Generator().manual_seed(case.samples(step, micro, dp_rank, ROWS).start)
        x = torch.randn(ROWS, case.width, generator=draws, dtype=torch.float64).to(total.dtype)
        with phase("forward"):
            y = x + leave(gelu(enter(x, tp) @ leaves["up"].T) @ leaves["down"], tp)
        (loss := (y - x.roll(1, 1)).square().mean() / (case.micro * case.dp)).backward()
        total += loss.detach()
    return total, {name: leaf.grad for name, leaf in leaves.items()}


def train(case, dp_ranks, own=slice(None), part=slice(None), tp=None, dp=None, exact=False):
    dtype, weights, lost, outcome = getattr(torch, case.dtype), {}, {}, {}  # rows `own` are this rank's, `part` of tp
    for seed, name in enumerate(("up", "down"), 100 * case.seed):
        draws = torch.Generator().manual_seed(seed)
        whole = torch.randn(INNER, case.width, generator=draws, dtype=torch.float64).mul_(0.5).to(dtype)
        weights[name] = whole[own].clone().requires_grad_()
        lost |= {(name, dp_rank): torch.zeros_like(whole[part]) for dp_rank in dp_ranks}
    optimizer = torch.optim.AdamW(weights.values(), lr=0.01)
    for step in range(case.steps):
        with phase("forward"):
            fp8 = partial(gather_weights, group=dp) if dp else partial(round_trip, wire=torch.float8_e4m3fn)
            low = {name: fp8(weight.detach(), block=case.block) for name, weight in weights.items()}
        total, sums = torch.zeros((), dtype=dtype), dict.fromkeys(weights, 0)
        for dp_rank in dp_ranks:
            loss, gradients = differentiate(case, low, step, dp_rank, tp)
            total += loss
            for name, gradient in gradients.items():
                full = gradient + lost[name, dp_rank] * case.feedback
                kept = full if exact else round_trip(full, torch.int8, case.block)
                lost[name, dp_rank] = full - kept
                with phase("grad_sync"):
                    sums[name] += reduce_gradient(full, case.block, dp) if dp else kept
        if dp:
            with phase("grad_sync"):
                dist.all_reduce(total, group=dp)
        for name, weight in weights.items():
            weight.grad = sums[name]
        outcome |= {f"loss/{step}": total} | {f"grad/{n}": sums[n].clone() for n in weights if step == 0}
        optimizer.step()
        losses = {name: torch.stack([lost[name, dp_rank] for dp_rank in dp_ranks]) for name in weights}
        outcome |= {f"lost_after/{step}/{name}": of_ranks for name, of_ranks in losses.items()}
    return outcome | {f"param/{name}": weight.detach() for name, weight in weights.items()}


def subject(case, device):
    mesh = dist.init_device_mesh("cpu", (case.dp, case.tp), mesh_dim_names=("dp", "tp"))
    (dp, tp), part = mesh.get_coordinate(), INNER // case.tp
    first, count = tp * part + dp * (part // case.dp), part // case.dp
    places = slice(first, first + count), slice(tp * part, tp * part + part)
    outcome = train(case, [dp], *places, mesh.get_group("tp"), mesh.get_group("dp"))
    for name, local in outcome.items():
        if name.startswith("lost_after/"):
            outcome[name] = Shard(local, (dp, tp * part, 0), (case.dp, INNER, case.width))
        elif not name.startswith("loss/"):
            outcome[name] = Shard(local, (first, 0), (INNER, case.width))
    return outcome


def expected(case):
    size, part = getattr(torch, case.dtype).itemsize, INNER // case.tp * case.width
    terms = [Term(op="all_reduce", axis="dp", phase="grad_sync", calls=case.steps, payload_bytes=size)]
    for name, op, dtype in (("forward", "all_gather", "uint8"), ("grad_sync", "all_to_all", "int8")):
        how = {"phase": name, "op": op, "axis": "dp", "calls": 2 * case.steps}
        terms += [Term(dtype=dtype, payload_bytes=part, **how)]
        terms += [Term(dtype=case.dtype, payload_bytes=part // case.block * size, **how)]
    hidden = {"op": "all_reduce", "axis": "tp", "payload_bytes": ROWS * case.width * size}
    return [*terms, Term(phase="forward", calls=case.steps * case.micro, **hidden)]


subject.truth, subject.expected = lambda case, device: train(case, range(case.dp), exact=True), expected
rule = ("each data rank's gradient is rounded to int8", lambda case, device: train(case, range(case.dp)))
subject.deviates = dict.fromkeys(("grad/*", "lost_after/*", "param/*", "loss/[!0]*"), rule)
subject.cases = ("tp=2 dp=3", "tp=3 dp=2 feedback=false", "dp=4 dtype=float32")
subject.words = {"width": 8, "block": 4, "feedback": True}
subject.refuses = lambda case: "tp dp divides 12" if INNER % (case.tp * case.dp) else ""
