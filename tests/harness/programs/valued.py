"""Small training scripts that know nothing of us, by their way of being parallel: what is recorded of them is known.

    valued.py KIND SEED

KIND: plain, frozen, checkpoint, reentrant, ddp, fsdp1, fsdp1-flat, fsdp2, tp, criterion, closure, parts, narrow. All
train the same two layers on the same samples in float64, but for those of data-parallel ranks, which have a half each.
fsdp1 is in float32; narrow is in bfloat16 with autocast and dropout.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

KIND, SEED = sys.argv[1], int(sys.argv[2])
ROWS, WIDTH, STEPS = 4, 6, 2


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down: nn.Module = nn.Linear(2 * WIDTH, WIDTH)
        self.same = nn.Identity()
        self.head = nn.Linear(WIDTH, 8, bias=False)
        if KIND in {"plain", "ddp"}:
            self.head.weight = self.table.weight

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.same(self.same(self.down(torch.relu(self.up(x)))))
        return found

    def forward(self, tokens: torch.Tensor, *, targets: torch.Tensor | None = None) -> Any:
        x = self.table(tokens)
        if KIND in {"checkpoint", "reentrant"}:
            x = x + checkpoint(self.mlp, x, use_reentrant=KIND == "reentrant")
        else:
            x = x + self.mlp(x)
        if KIND == "narrow":
            with torch.autocast("cpu", dtype=torch.bfloat16):
                x = nn.functional.dropout(self.mlp(x.float()), 0.5).to(torch.bfloat16)
        logits = self.head(x)
        if targets is None:
            return logits
        return {"logits": logits, "loss": nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten())}


def parallel(model: Model) -> nn.Module:
    if KIND == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if KIND.startswith("fsdp1"):
        from torch.distributed.fsdp import FullyShardedDataParallel  # noqa: PLC0415

        return FullyShardedDataParallel(model, use_orig_params=KIND == "fsdp1", device_id=torch.device("cpu"))
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415

    if KIND == "fsdp2":
        from torch.distributed.fsdp import fully_shard  # noqa: PLC0415

        fully_shard(model.down)
        fully_shard(model)
    if KIND == "tp":
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module  # noqa: PLC0415

        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
        parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def samples(step: int) -> Iterator[torch.Tensor]:
    """The micro-batches of this rank: two of two rows each, of which data-parallel ranks have one."""
    generator = torch.Generator().manual_seed(step)
    whole = torch.randint(0, 8, (ROWS, 5), generator=generator)
    shared = KIND == "ddp" or KIND.startswith("fsdp")
    parts = whole.chunk(2)
    yield from parts[dist.get_rank() :][:1] if shared else parts


def main() -> None:
    torch.set_default_dtype(torch.float32 if KIND == "narrow" else torch.float64)
    if KIND in {"ddp", "fsdp1", "fsdp1-flat", "fsdp2", "tp"}:
        dist.init_process_group("gloo")
    torch.manual_seed(SEED)
    drawn = Model()
    if KIND == "frozen":
        drawn.table.requires_grad_(False)
    if KIND in {"narrow", "fsdp1"}:
        drawn.to(torch.bfloat16 if KIND == "narrow" else torch.float32)
    model = parallel(drawn)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.01)
    criterion = nn.CrossEntropyLoss()
    for step in range(STEPS):
        batches = list(samples(step))

        def compute(batches: list[torch.Tensor] = batches) -> torch.Tensor:
            optimizer.zero_grad()
            total = torch.zeros(())
            for number, tokens in enumerate(batches):
                if KIND == "parts":
                    loss = drawn.forward(tokens, targets=tokens)["loss"]  # its modules are called, it is not
                elif KIND == "criterion":
                    loss = criterion(model(tokens).flatten(0, -2), tokens.flatten())
                else:
                    loss = model(tokens, targets=tokens)["loss"]
                loss = loss / len(batches)
                if KIND == "ddp" and number < len(batches) - 1:
                    with model.no_sync():  # type: ignore[operator]
                        loss.backward()
                elif KIND == "parts":
                    torch.autograd.backward(loss, grad_tensors=torch.ones_like(loss))
                else:
                    loss.backward()
                total += loss.detach()
            return total

        if KIND == "closure":
            total = optimizer.step(compute)
        else:
            total = compute()
            clip: Callable[..., Any] = (
                model.clip_grad_norm_  # type: ignore[assignment]
                if KIND.startswith("fsdp1")
                else lambda most, model=model: nn.utils.clip_grad_norm_(model.parameters(), most)
            )
            if KIND not in {"tp", "fsdp1-flat"}:  # torch clips no mixture of DTensors, and FSDP1 no float64
                clip(0.05)
            optimizer.step()
        print(f"{float(total):.17g}")
    with torch.no_grad():
        print(sum(float(getattr(p, "_local_tensor", p).double().sum()) for p in model.parameters()))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


main()
