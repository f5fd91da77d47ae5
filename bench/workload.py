"""The benchmark workload: a two-layer tensor-parallel transformer of plain tensors, and its dense model.

Small enough that the cost is op dispatch and hand-offs, not arithmetic. Shapes: x, dy [batch, seq, hidden]; weights are
[out, in]; per layer 12 weights. A rank holds `heads / W` heads and `ffn / W` columns and issues 4 all_reduces a layer,
two forward and two backward (Megatron-LM, arXiv 1909.08053, section 3). With `comm` off the rank runs the same
operations without a single collective: the floor that an engine is measured against. Everything follows from
`sizes.seed`. An example is one forward and backward; its ranks here are processes, of a pool or spawned for it.
Each draws the weights, runs the dense pass itself and compares its own part with it. Every wait is bounded.
"""

import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn
from torch.nn import functional

from shardproof.harness.engines.engine import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of a run. The default is the workload of the published numbers."""

    layers: int = 2
    hidden: int = 64
    heads: int = 8
    seq: int = 16
    batch: int = 2
    ffn: int = 256
    dtype: torch.dtype = torch.float64
    seed: int = 0


class Passed(NamedTuple):
    """Results of a forward and backward: output, gradient of the input, gradients of the weights by name."""

    y_BSH: Tensor
    dx_BSH: Tensor
    gradients: dict[str, Tensor]


def weights(sizes: Sizes) -> dict[str, Tensor]:
    """All weights by name: norm, qkv (rows by head: q, k, v), out, norm, up, down, each with a bias."""
    draw = torch.Generator().manual_seed(sizes.seed)
    hidden, ffn = sizes.hidden, sizes.ffn
    shapes = {"norm1": (hidden,), "qkv": (3 * hidden, hidden), "out": (hidden, hidden)}
    shapes |= {"norm2": (hidden,), "up": (ffn, hidden), "down": (hidden, ffn)}
    drawn = {}
    for layer in range(sizes.layers):
        for name, shape in shapes.items():
            scale = 0.1 if len(shape) == 1 else shape[-1] ** -0.5
            weight = torch.randn(shape, generator=draw, dtype=sizes.dtype) * scale
            drawn[f"{layer}.{name}.weight"] = weight + 1 if len(shape) == 1 else weight
            drawn[f"{layer}.{name}.bias"] = torch.randn(shape[0], generator=draw, dtype=sizes.dtype) * 0.1
    return drawn


def data(sizes: Sizes) -> tuple[Tensor, Tensor]:
    """The input and the gradient of the output."""
    draw = torch.Generator().manual_seed(sizes.seed + 1)
    shape = (sizes.batch, sizes.seq, sizes.hidden)
    return torch.randn(shape, generator=draw, dtype=sizes.dtype), torch.randn(shape, generator=draw, dtype=sizes.dtype)


def dense(sizes: Sizes, full: dict[str, Tensor], x_BSH: Tensor, dy_BSH: Tensor) -> Passed:
    """The whole model in one process."""
    return run_pass(sizes, full, x_BSH, dy_BSH, world_size=1, comm=False)


def rank_program(
    rank: int, world_size: int, sizes: Sizes, full: dict[str, Tensor], x_BSH: Tensor, dy_BSH: Tensor, comm: bool = True
) -> Passed:
    """Forward and backward of one rank; the gradients are those of its shards."""
    shards = {name: shard(name, weight, rank, world_size) for name, weight in full.items()}
    return run_pass(sizes, shards, x_BSH, dy_BSH, world_size=world_size, comm=comm)


def shard(name: str, weight: Tensor, rank: int, world_size: int) -> Tensor:
    """A rank's part: rows of qkv and up, columns of out and down, the rest in full."""
    if name.endswith(("qkv.weight", "qkv.bias", "up.weight", "up.bias")):
        return weight.chunk(world_size)[rank]
    if name.endswith(("out.weight", "down.weight")):
        return weight.chunk(world_size, dim=1)[rank]
    return weight


def largest_error(passed: list[Passed], reference: Passed) -> float:
    """The largest absolute difference of any rank's output, input gradient or weight gradient from the dense one."""
    return max(_apart(mine, reference, rank, len(passed)) for rank, mine in enumerate(passed))


def _apart(mine: Passed, reference: Passed, rank: int, world_size: int) -> float:
    pairs = [(mine.y_BSH, reference.y_BSH), (mine.dx_BSH, reference.dx_BSH)]
    pairs += [(grad, shard(name, reference.gradients[name], rank, world_size)) for name, grad in mine.gradients.items()]
    return max(float((one - other).abs().max()) for one, other in pairs)


class _Copy(torch.autograd.Function):
    """Identity forward, all_reduce backward: entry of the parallel part. Pair: _Reduce."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: bool) -> Tensor:
        ctx.comm = comm
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous()
        if ctx.comm:
            dist.all_reduce(gradient)
        return gradient, None


class _Reduce(torch.autograd.Function):
    """all_reduce forward, identity backward: exit of the parallel part. Pair: _Copy."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, comm: bool) -> Tensor:
        x = partial.contiguous()
        if comm:
            dist.all_reduce(x)
        if x is partial:
            ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def run_pass(
    sizes: Sizes, shards: dict[str, Tensor], x_BSH: Tensor, dy_BSH: Tensor, *, world_size: int, comm: bool = True
) -> Passed:
    """Forward and backward with a rank's shards; the gradients are those of the shards."""
    own = {name: weight.detach().requires_grad_() for name, weight in shards.items()}
    x = start = x_BSH.detach().requires_grad_()
    heads, head_dim = sizes.heads // world_size, sizes.hidden // sizes.heads
    for layer in range(sizes.layers):
        weight = {name.removeprefix(f"{layer}."): value for name, value in own.items() if name.startswith(f"{layer}.")}
        normed = functional.layer_norm(x, (sizes.hidden,), weight["norm1.weight"], weight["norm1.bias"])
        normed = _Copy.apply(normed, comm)
        qkv = functional.linear(normed, weight["qkv.weight"], weight["qkv.bias"])
        q, k, v = qkv.view(sizes.batch, sizes.seq, heads, 3, head_dim).permute(3, 0, 2, 1, 4)
        scores = (q @ k.transpose(-1, -2)) * head_dim**-0.5
        future = torch.ones(sizes.seq, sizes.seq, dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(future, float("-inf")).softmax(-1) @ v
        mixed = mixed.transpose(1, 2).reshape(sizes.batch, sizes.seq, -1)
        attended = mixed @ weight["out.weight"].t()
        attended = _Reduce.apply(attended, comm)
        x = x + attended + weight["out.bias"]
        normed = functional.layer_norm(x, (sizes.hidden,), weight["norm2.weight"], weight["norm2.bias"])
        normed = _Copy.apply(normed, comm)
        up = functional.gelu(functional.linear(normed, weight["up.weight"], weight["up.bias"]), approximate="tanh")
        down = up @ weight["down.weight"].t()
        down = _Reduce.apply(down, comm)
        x = x + down + weight["down.bias"]
    (x * dy_BSH).sum().backward()
    assert start.grad is not None
    return Passed(x.detach(), start.grad, {name: value.grad for name, value in own.items() if value.grad is not None})


LIMIT_S = 60.0
"""The longest wait for a process."""


def pooled_example(engine: Engine, world_size: int, seed: int, allowed: float) -> None:
    """Run an example on the ranks of an engine. Raises RuntimeError when it is wrong."""
    require_right(engine.run(_error, world_size, seed, world_size=world_size, timeout_s=LIMIT_S), allowed)


def _error(rank: int, world_size: int, seed: int) -> float:
    """The largest difference of this rank's example from the dense pass."""
    sizes = Sizes(seed=seed)
    full, (x, dy) = weights(sizes), data(sizes)
    truth = dense(sizes, full, x, dy)
    return _apart(rank_program(rank, world_size, sizes, full, x, dy), truth, rank, world_size)


def _run_spawned(rank: int, world_size: int, store: str, seed: int, allowed: float) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timedelta(seconds=LIMIT_S)
    )
    require_right([_error(rank, world_size, seed)], allowed)
    dist.destroy_process_group()


def spawned_example(world_size: int, seed: int, allowed: float) -> float:
    """Seconds of one example whose processes are spawned for it.

    Raises what a rank raises, RuntimeError when the ranks do not end or compute something else.
    """
    with tempfile.TemporaryDirectory() as folder:
        start_s = time.perf_counter()
        arguments = (world_size, f"{folder}/store", seed, allowed)
        ranks = spawn(_run_spawned, args=arguments, nprocs=world_size, join=False)
        try:
            while not ranks.join(timeout=1.0):
                if time.perf_counter() - start_s > LIMIT_S:
                    raise RuntimeError(f"the spawned ranks did not end within {LIMIT_S:.0f} s")
        finally:
            for process in ranks.processes:
                process.kill()
        return time.perf_counter() - start_s


def require_right(errors: list[float], allowed: float) -> None:
    """Raises RuntimeError if the error of an example is larger than allowed."""
    if not max(errors) < allowed:
        raise RuntimeError(f"the example is wrong by {max(errors):.1e}: its time means nothing")
