"""A small GPT trained as users do: `--mode one|ddp|tp|dtensor|fsdp2|pp`, each as its documentation shows it.

`--edit` plants a mistake. Launched by torchrun or alone.
"""

import argparse
import math
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EDITS = (
    *("sampler_seed", "missing_average", "loss_count", "norm_sum", "wrong_slice", "clip_early", "stale_gradient"),
    *("factor_not_summed", "same_batch", "seed_by_rank", "frozen", "detached", "dropout", "stage_gradient"),
)
BY_HAND = ("missing_average", "clip_early", "stale_gradient", "seed_by_rank")
"""Edits of a loop that averages gradients by hand."""
parser = argparse.ArgumentParser()
parser.add_argument("--mode", default="one")
parser.add_argument("--edit", default="", choices=("", *EDITS))
parser.add_argument("--steps", type=int, default=2)
parser.add_argument("--width", type=int, default=32)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--vocab", type=int, default=64)
parser.add_argument("--seq", type=int, default=16)
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--seed", type=int, default=0)
HEADS = 4


class _Copy(torch.autograd.Function):
    """Megatron's f: the identity, whose backward sums over the ranks."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient


class _Reduce(torch.autograd.Function):
    """Megatron's g: a sum over the ranks, whose backward is the identity."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        x = x.contiguous().clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.wq, self.wk, self.wv = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.wo = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (linear(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for linear in (self.wq, self.wk, self.wv))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.gelu(self.w1(x)))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.mlp = Attention(width, heads), Mlp(width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.norm1(x)))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class GPT(nn.Module):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.tokens = nn.Embedding(args.vocab, args.width)
        self.places = nn.Embedding(args.seq, args.width)
        dropout = 0.1 if args.edit == "dropout" else 0.0
        self.layers = nn.ModuleList(Block(args.width, HEADS, dropout) for _ in range(args.layers))
        self.norm = nn.LayerNorm(args.width)
        self.head = nn.Linear(args.width, args.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class _Column(nn.Module):
    def __init__(self, linear: nn.Linear, rank: int, size: int, shift: int = 0, copies: bool = True) -> None:
        super().__init__()
        place, self.copies = (rank + shift) % size, copies
        self.weight = nn.Parameter(linear.weight.detach().chunk(size, 0)[place].clone())
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().chunk(size, 0)[rank].clone())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(_Copy.apply(x) if self.copies else x, self.weight, self.bias)


class _Row(nn.Module):
    def __init__(self, linear: nn.Linear, rank: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(linear.weight.detach().chunk(size, 1)[rank].clone())
        self.bias = nn.Parameter(linear.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return _Reduce.apply(F.linear(x, self.weight)) + self.bias  # type: ignore[no-any-return]


def cut_by_hand(model: GPT, rank: int, size: int, edit: str) -> None:
    """Megatron's tensor parallelism, by hand."""
    for number, layer in enumerate(model.layers):
        attention: Any = layer.attention
        mlp: Any = layer.mlp
        for name in ("wq", "wk", "wv"):
            shift = int(edit == "wrong_slice" and name == "wv" and number == 1)
            copies = not (edit == "factor_not_summed" and name == "wk" and number == 1)
            setattr(attention, name, _Column(getattr(attention, name), rank, size, shift, copies))
        attention.wo = _Row(attention.wo, rank, size)
        mlp.w1, mlp.w2 = _Column(mlp.w1, rank, size), _Row(mlp.w2, rank, size)


def cut_by_dtensor(model: GPT, size: int) -> None:
    """Tensor parallelism by placements."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    for layer in model.layers:
        plan = {f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")}
        rows = {"attention.wo": RowwiseParallel(), "mlp.w2": RowwiseParallel()}
        parallelize_module(layer, mesh, {**plan, **rows, "mlp.w1": ColwiseParallel()})


class Stage(nn.Module):
    """A stage of the model, with layers counted from 0."""

    def __init__(self, model: GPT, stage: int, stages: int) -> None:
        super().__init__()
        share = len(model.layers) // stages
        self.first, self.last = stage == 0, stage == stages - 1
        self.layers = nn.ModuleList(list(model.layers)[share * stage : share * (stage + 1)])
        if self.first:
            self.tokens, self.places = model.tokens, model.places
        if self.last:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            x = self.tokens(x) + self.places(torch.arange(x.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)) if self.last else x


def step_of_stage(stage: nn.Module, rank: int, x: Tensor, y: Tensor, args: argparse.Namespace) -> None:
    """Forward and backward of one batch over all stages."""
    given = torch.empty(*x.shape, args.width, dtype=next(stage.parameters()).dtype)
    if rank:
        dist.recv(given, rank - 1)
        given.requires_grad_()
    out = stage(given if rank else x)
    if rank == dist.get_world_size() - 1:
        loss = F.cross_entropy(out.flatten(0, 1), y.flatten()) / args.accumulate
        loss.data = torch.empty(())  # freed and scaled then, as Megatron does
        (loss * torch.ones(1)).backward()
    else:
        dist.send(out.detach().contiguous(), rank + 1)
        gradient = torch.empty_like(out)
        dist.recv(gradient, rank + 1)
        torch.autograd.backward(out, gradient)
    if rank:
        assert given.grad is not None
        dist.send(given.grad.contiguous() * (1 + int(args.edit == "stage_gradient")), rank - 1)


def batches_of(args: argparse.Namespace, rank: int, shards: int) -> Iterator[Any]:
    """The batches of a data rank among `shards`."""
    count = args.steps * args.batch * args.accumulate
    drawn = torch.randint(0, args.vocab, (count, args.seq + 1), generator=torch.Generator().manual_seed(7))
    data = TensorDataset(drawn[:, :-1], drawn[:, 1:])
    place = 0 if args.edit == "same_batch" or shards == 1 else rank
    seed = args.seed + (rank if args.edit == "sampler_seed" else 0)
    sampler: DistributedSampler[Any] = DistributedSampler(data, shards, place, seed=seed, drop_last=True)
    return iter(DataLoader(data, args.batch // shards, sampler=sampler))


def laid_out(model: GPT, args: argparse.Namespace, rank: int, size: int) -> nn.Module:
    """The model as the ranks of a mode hold it."""
    if args.mode == "tp":
        cut_by_hand(model, rank, size, args.edit)
    elif args.mode == "dtensor":
        cut_by_dtensor(model, size)
    elif args.mode == "fsdp2":
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif args.mode == "pp":
        return Stage(model, rank, size)
    return model


def backward(trained: nn.Module, args: argparse.Namespace, x: Tensor, y: Tensor, shards: int) -> None:
    """Forward, loss and backward of one batch."""
    loss = F.cross_entropy(trained(x).flatten(0, 1), y.flatten(), reduction="sum")
    loss = loss / (y.numel() * args.accumulate * (shards if args.edit == "loss_count" else 1))
    if args.edit == "detached":
        loss = (loss.detach() * torch.ones((), requires_grad=True)).sum()
    loss.backward()


def main() -> None:
    args = parser.parse_args()
    edit, mode = args.edit, args.mode
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.set_num_threads(1)
    torch.manual_seed(args.seed + (rank if edit == "seed_by_rank" else 0))
    model = laid_out(GPT(args), args, rank, size)
    shards = size if mode in ("ddp", "fsdp2") else 1
    batches = batches_of(args, rank, shards)
    by_hand = mode == "ddp" and edit in BY_HAND
    trained = DistributedDataParallel(model) if mode == "ddp" and not by_hand else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0 if edit == "frozen" else 1e-2)
    parameters = [*model.parameters()]
    for step in range(args.steps):
        if not (edit == "stale_gradient" and step == 1):
            optimizer.zero_grad()
        for _ in range(args.accumulate):
            x, y = next(batches)
            if mode == "pp":
                step_of_stage(trained, rank, x, y, args)
            else:
                backward(trained, args, x, y, shards)
        if edit == "clip_early":
            nn.utils.clip_grad_norm_(parameters, 0.5)
        if by_hand and edit != "missing_average":
            for gradient in (parameter.grad for parameter in parameters if parameter.grad is not None):
                dist.all_reduce(gradient)
                gradient.div_(size)
        if edit != "clip_early":
            clip(parameters, model, mode, edit)
        optimizer.step()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def clip(parameters: list[nn.Parameter], model: nn.Module, mode: str, edit: str) -> None:
    """Clip by the norm of all gradients, which ranks of tp and stages hold in parts."""
    if mode == "dtensor":  # torch's function takes no mixture of tensors and DTensors
        grads = [p.grad for p in parameters if p.grad is not None]
        full = [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in grads]
        norm = torch.stack([grad.square().sum() for grad in full]).sum().sqrt()
        for grad in grads:
            grad.mul_(min(1.0, 0.5 / (float(norm) + 1e-6)))
        return
    if mode not in ("tp", "pp"):
        nn.utils.clip_grad_norm_(parameters, 0.5)
        return
    whole = {id(p) for m in model.modules() if not isinstance(m, _Column) for p in m.parameters(recurse=False)}
    whole -= {id(m.weight) for m in model.modules() if isinstance(m, _Row)}
    grads = [p for p in parameters if p.grad is not None]
    squares = sum((p.grad.square().sum() for p in grads if id(p) not in whole), torch.zeros(()))  # type: ignore[union-attr]
    shared = sum((p.grad.square().sum() for p in grads if id(p) in whole), torch.zeros(()))  # type: ignore[union-attr]
    if mode == "pp":
        squares, shared = squares + shared, torch.zeros(())
    if edit != "norm_sum":
        dist.all_reduce(squares)
    norm = (squares + shared).sqrt()
    scale = min(1.0, 0.5 / (float(norm) + 1e-6))
    for p in grads:
        assert p.grad is not None
        p.grad.mul_(scale)
    assert math.isfinite(float(norm))


if __name__ == "__main__":
    main()
