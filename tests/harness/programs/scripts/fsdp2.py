"""FSDP2: `fully_shard` of two blocks and the whole, two ranks, AdamW, gradients clipped."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


def main() -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 6)) for _ in range(2)]
    model = nn.Sequential(nn.Embedding(20, 6), *blocks, nn.Linear(6, 20))
    for block in blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(3):
        tokens = torch.arange(8).view(2, 4) + 3 * dist.get_rank() + step
        loss = nn.functional.cross_entropy(model(tokens).view(-1, 20), tokens.view(-1))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            sys.stdout.write(f"fsdp2 {loss.item():.17g}\n")


if __name__ == "__main__":
    main()
