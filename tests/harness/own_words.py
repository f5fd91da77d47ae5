"""A two-layer network cut over tp, trained over dp, with a dense model and words of its own; and wrong ones."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardproof.harness.protocols import Shard

ROWS, INNER, LR = 5, 24, 0.1
WORDS = {"width": 12, "act": ("relu", "tanh"), "micro": 3}
CASES = ("tp=2 dp=3", "tp=3 act=tanh dtype=float32", "dp=2 dtype=bfloat16")


def weights(case: Any) -> tuple[Tensor, Tensor]:
    """W1 [INNER, width] and W2 [width, INNER], from the seed."""
    generator = torch.Generator().manual_seed(case.seed)
    drawn = torch.randn(2, INNER, case.width, generator=generator, dtype=torch.float64).mul(0.3)
    w1, w2 = drawn.to(getattr(torch, case.dtype))
    return w1, w2.T.contiguous()


def samples(case: Any, step: int, micro: int, dp_rank: int) -> Tensor:
    """The samples [ROWS, width] of a micro-batch, each drawn from its own number."""
    generators = [torch.Generator().manual_seed(case.seed + n) for n in case.samples(step, micro, dp_rank, ROWS)]
    rows = [torch.randn(case.width, generator=generator, dtype=torch.float64) for generator in generators]
    return torch.stack(rows).to(getattr(torch, case.dtype))


def loss_of(case: Any, y: Tensor) -> Tensor:
    """The share of a micro-batch in the mean loss of a step."""
    share: Tensor = y.square().sum() / (ROWS * case.micro * case.dp)
    return share


def truth(case: Any, device: torch.device) -> Mapping[str, Tensor]:
    """Dense training."""
    return trained(case, *weights(case))


def trained(case: Any, w1: Tensor, w2: Tensor) -> Mapping[str, Tensor]:
    """Dense training from these weights."""
    w1, w2 = w1.requires_grad_(), w2.requires_grad_()
    outcome: dict[str, Tensor] = {}
    for step in range(case.steps):
        losses = []
        for micro in range(case.micro):
            for dp_rank in range(case.dp):
                x = samples(case, step, micro, dp_rank)
                losses.append(loss_of(case, getattr(torch, case.act)(x @ w1.T) @ w2.T))
                losses[-1].backward()
        outcome[f"loss/{step}"] = torch.stack(losses).sum().detach()
        outcome |= _stepped({"w1": w1, "w2": w2}, step)
    return {**outcome, "param/w1": w1.detach(), "param/w2": w2.detach()}


def _stepped(parameters: Mapping[str, Tensor], step: int) -> dict[str, Tensor]:
    """Take a step of SGD by hand; the gradients of the first one."""
    gradients = {f"grad/{name}": parameter.grad.clone() for name, parameter in parameters.items()}  # type: ignore[union-attr]
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.sub_(parameter.grad, alpha=LR)  # type: ignore[arg-type]
            parameter.grad = None
    return gradients if step == 0 else {}


class Copied(torch.autograd.Function):
    """The input as it is; its gradient is the sum over the group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        """The input."""
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """The sum of the ranks' gradients."""
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Reduced(torch.autograd.Function):
    """The sum over the group; its gradient is passed on as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        """The sum of the ranks' inputs."""
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """The gradient."""
        return gradient, None


class Network:
    """The subject. `factor`, or that of a case, multiplies the loss: any but 1 is a bug. Keywords state more."""

    words, cases = WORDS, CASES
    truth = staticmethod(truth)

    def __init__(self, factor: float | Callable[[Any], float] = 1.0, **stated: object) -> None:
        self.factor = factor
        vars(self).update(stated)

    def weights(self, case: Any) -> tuple[Tensor, Tensor]:
        """Initial weights of training, in full."""
        return weights(case)

    def __call__(self, case: Any, device: torch.device) -> Mapping[str, Any]:
        factor = self.factor(case) if callable(self.factor) else self.factor
        rank = dist.get_rank()
        groups = {axis: _group(case.axes[axis], rank) for axis in ("tp", "dp")}
        place, part = case.axis_rank("tp", rank), INNER // case.tp
        w1, w2 = self.weights(case)
        w1 = w1[place * part :][:part].clone().requires_grad_()
        w2 = w2[:, place * part :][:, :part].clone().requires_grad_()
        shapes = {"w1": ((place * part, 0), (INNER, case.width)), "w2": ((0, place * part), (case.width, INNER))}
        outcome: dict[str, Any] = {}
        for step in range(case.steps):
            losses = []
            for micro in range(case.micro):
                x = Copied.apply(samples(case, step, micro, case.axis_rank("dp", rank)), groups["tp"])
                y = Reduced.apply(getattr(torch, case.act)(x @ w1.T) @ w2.T, groups["tp"])
                losses.append(loss_of(case, y) * factor)
                losses[-1].backward()
            loss = torch.stack(losses).sum().detach()
            dist.all_reduce(loss, group=groups["dp"])
            outcome[f"loss/{step}"] = loss
            for parameter in (w1, w2):
                dist.all_reduce(parameter.grad, group=groups["dp"])
            stepped = _stepped({"w1": w1, "w2": w2}, step)
            outcome |= {name: Shard(value, *shapes[name.partition("/")[2]]) for name, value in stepped.items()}
        last = {"w1": w1, "w2": w2}
        return outcome | {f"param/{name}": Shard(last[name].detach(), *shapes[name]) for name in last}


def _group(lists: Any, rank: int) -> Any:
    groups = {tuple(ranks): dist.new_group(list(ranks)) for ranks in lists}
    return next(group for ranks, group in groups.items() if rank in ranks)


subject = Network()
doubled = Network(factor=2.0)
