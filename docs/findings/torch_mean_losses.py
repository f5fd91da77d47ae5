"""torch 2.13.0: mean losses of DTensors that are split over ranks, against the same losses of whole tensors.

python docs/findings/torch_mean_losses.py gradient|uneven        exit status 1 while the defect is there
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

RANKS = 2
LOSSES = (F.mse_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy, F.l1_loss)


def rank_main(rank, folder, rows):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS))
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    generator = torch.Generator().manual_seed(0)
    values, targets = (torch.rand(rows, 3, dtype=torch.float64, generator=generator) for _ in range(2))
    numbers = {}
    for loss in LOSSES:
        whole, split = values.clone().requires_grad_(), distribute_tensor(values, mesh, [Shard(0)]).requires_grad_()
        right, of_split = loss(whole, targets), loss(split, distribute_tensor(targets, mesh, [Shard(0)]))
        right.backward()
        of_split.backward()
        pairs = (of_split.full_tensor(), right), (split.grad.full_tensor().norm(), whole.grad.norm())
        numbers[loss.__name__] = [(got.item(), expected.item()) for got, expected in pairs]
    if rank == 0:
        torch.save(numbers, f"{folder}/numbers")
    dist.destroy_process_group()


if __name__ == "__main__":
    print("torch", torch.__version__.partition("+")[0])
    rows = {"gradient": 6, "uneven": 5}[sys.argv[1]]
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (folder, rows), nprocs=RANKS)
        numbers = torch.load(f"{folder}/numbers")
    wrong = 0
    for name, ((loss, right_loss), (norm, right_norm)) in numbers.items():
        print(f"{name}: {loss:.6f}, right {right_loss:.6f}; norm of its gradient {norm:.6f}, right {right_norm:.6f}")
        wrong += abs(loss - right_loss) > 1e-9 if sys.argv[1] == "uneven" else abs(norm - right_norm) > 1e-9
    sys.exit(wrong > 0)
