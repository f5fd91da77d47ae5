"""The dense decoder split by hand: tp with or without the sequence split between blocks (mode=tp-sp), and dp.

Hidden states are whole on every rank (tp) or [B, S/tp, H] (tp-sp) outside of attention and MLP.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from shardproof.harness.protocols import Shard
from shardproof.reference.case import Case
from tests.harness.running.locating.dense import rows, weights


class _Groups:
    """The groups of one rank."""

    def __init__(self, case: Case) -> None:
        self.tp, self.dp = (self._mine(case.axes[axis], axis) for axis in ("tp", "dp"))
        self.rank, self.size = dist.get_rank(self.tp), case.tp
        self.data_rank = dist.get_rank(self.dp)
        self.split = case.mode == "tp-sp"

    def _mine(self, lists: tuple[tuple[int, ...], ...], name: str) -> dist.ProcessGroup:
        mine: dist.ProcessGroup | None = None
        for ranks in lists:
            group: Any = dist.new_group(list(ranks), group_desc=name)
            if dist.get_rank() in ranks:
                mine = group
        assert mine is not None  # the lists of an axis hold every rank
        return mine

    def sum(self, x: Tensor) -> Tensor:
        """The sum over tp."""
        x = x.clone()
        dist.all_reduce(x, group=self.tp)
        return x

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """All parts along a dim."""
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self.tp)
        return torch.cat(parts, dim)

    def part(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part along a dim."""
        return x.chunk(self.size, dim)[self.rank]


class _Both(torch.autograd.Function):
    """A function forward, another backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grads[0]), None, None


def _apply(x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
    y: Tensor = _Both.apply(x, there, back)
    return y


class Column(nn.Module):
    """A linear map whose outputs are split; its input enters the region here."""

    def __init__(self, groups: _Groups, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.groups = groups
        self.weight = nn.Parameter(groups.part(weight, 0).clone())
        self.bias = None if bias is None else nn.Parameter(groups.part(bias, 0).clone())

    def forward(self, x: Tensor) -> Tensor:
        groups = self.groups
        if groups.split:
            x = _apply(x, lambda t: groups.gather(t, 1), lambda g: groups.part(groups.sum(g), 1))
        else:
            x = _apply(x, lambda t: t.clone(), groups.sum)
        return functional.linear(x, self.weight, self.bias)


class Row(nn.Module):
    """A linear map whose inputs are split; the sum leaves the region here."""

    def __init__(self, groups: _Groups, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.groups = groups
        self.weight, self.bias = nn.Parameter(groups.part(weight, 1).clone()), nn.Parameter(bias.clone())

    def forward(self, x: Tensor) -> Tensor:
        groups = self.groups
        y = functional.linear(x, self.weight)
        if groups.split:
            y = _apply(y, lambda t: groups.part(groups.sum(t), 1), lambda g: groups.gather(g, 1))
        else:
            y = _apply(y, groups.sum, lambda g: g)
        return y + self.bias


class Norm(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


class Embedding(nn.Module):
    """Rows of the table, of this rank's part of the sequence where that is split."""

    def __init__(self, groups: _Groups, weight: Tensor) -> None:
        super().__init__()
        self.groups, self.weight = groups, nn.Parameter(weight.clone())

    def forward(self, tokens: Tensor) -> Tensor:
        if self.groups.split:
            tokens = self.groups.part(tokens, 1)
        return functional.embedding(tokens, self.weight)


class Attention(nn.Module):
    def __init__(self, groups: _Groups, given: Mapping[str, Tensor], head: int) -> None:
        super().__init__()
        self.head = head
        self.q = Column(groups, given["q.weight"], given["q.bias"])
        self.k = Column(groups, given["k.weight"], given["k.bias"])
        self.v = Column(groups, given["v.weight"], given["v.bias"])
        self.o = Row(groups, given["o.weight"], given["o.bias"])

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, self.head)).transpose(1, 2) for part in (self.q(x), self.k(x), self.v(x)))
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        y: Tensor = self.o(seen.transpose(1, 2).flatten(2))
        return y


class Mlp(nn.Module):
    def __init__(self, groups: _Groups, given: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.up = Column(groups, given["up.weight"], given["up.bias"])
        self.down = Row(groups, given["down.weight"], given["down.bias"])

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(functional.gelu(self.up(x)))
        return y


class Block(nn.Module):
    def __init__(self, groups: _Groups, given: Mapping[str, Tensor], head: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = Norm(given["norm1.weight"]), Norm(given["norm2.weight"])
        self.attention = Attention(groups, _below(given, "attention"), head)
        self.mlp = Mlp(groups, _below(given, "mlp"))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y: Tensor = x + self.mlp(self.norm2(x))
        return y


class Decoder(nn.Module):
    def __init__(self, case: Case, groups: _Groups) -> None:
        super().__init__()
        given = weights(case)
        self.embedding = Embedding(groups, given["embedding.weight"])
        self.layers = nn.ModuleList(
            Block(groups, _below(given, f"layers.{index}"), case.head_dim) for index in range(case.layers)
        )
        self.final_norm = Norm(given["final_norm.weight"])
        self.head = Column(groups, given["head.weight"], None)

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, S] tokens to this rank's part of the logits, [B, S, vocab/tp]."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        y: Tensor = self.head(self.final_norm(x))
        return y


def _below(given: Mapping[str, Tensor], path: str) -> dict[str, Tensor]:
    return {name.removeprefix(f"{path}."): value for name, value in given.items() if name.startswith(f"{path}.")}


def subject(case: Case, device: torch.device) -> dict[str, Any]:
    """Loss, logits and gradients of one step; every tensor that is split as a Shard."""
    groups = _Groups(case)
    model = Decoder(case, groups)
    loss, logits = torch.zeros((), dtype=torch.float64), list[Tensor]()
    for micro in range(case.micro):
        tokens = rows(case, groups.data_rank, micro)
        part = model(tokens[:, :-1])
        full = _apply(part, lambda t: groups.gather(t, 2), lambda g: groups.part(g, 2))
        # All ranks of tp compute the same loss from the gathered logits.
        one = functional.cross_entropy(full.flatten(0, 1), tokens[:, 1:].flatten()) / (case.micro * case.dp)
        one.backward()
        loss, logits = loss + one.detach(), [*logits, part.detach()]
    dist.all_reduce(loss, group=groups.dp)
    for name, parameter in model.named_parameters():
        if groups.split and _is_summed(name):
            dist.all_reduce(parameter.grad, group=groups.tp)
        dist.all_reduce(parameter.grad, group=groups.dp)
    local = torch.cat(logits)
    shape = (case.dp * local.shape[0], local.shape[1], case.vocab)
    outcome: dict[str, Any] = {
        "loss/0": loss,
        "logits/0": Shard(local, (groups.data_rank * local.shape[0], 0, groups.rank * local.shape[2]), shape),
    }
    for name, parameter in model.named_parameters():
        outcome[f"grad/{name}"] = _placed(groups, name, parameter.grad)
    return outcome


def _is_summed(name: str) -> bool:
    """Whether every rank of tp has a part of this gradient's sum where the sequence is split."""
    return "norm" in name or name.startswith("embedding") or name.endswith(("o.bias", "down.bias"))


def _placed(groups: _Groups, name: str, gradient: Tensor | None) -> Any:
    assert gradient is not None  # every parameter is used
    column = name.rpartition(".")[0].rpartition(".")[2] in ("q", "k", "v", "up", "head")
    row = name.endswith(("o.weight", "down.weight"))
    if not column and not row:
        return gradient
    dim = 0 if column else 1
    shape, offsets = list(gradient.shape), [0] * gradient.dim()
    offsets[dim] = groups.rank * shape[dim]
    shape[dim] *= groups.size
    return Shard(gradient, tuple(offsets), tuple(shape))
