"""torch 2.13.0: the gradient of the largest element of a DTensor that is split over ranks.

python docs/findings/torch_largest.py        exit status 1 while the defect is there
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

RANKS = 2
FUNCTIONS = {"amax": torch.amax, "norm of order inf": lambda values: torch.linalg.vector_norm(values, float("inf"))}


def rank_main(rank, folder):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS))
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    values, numbers = torch.tensor([[1.0, 5.0], [2.0, 3.0], [4.0, 0.0]]), {}
    for name, function in FUNCTIONS.items():
        split = distribute_tensor(values, mesh, [Shard(1)]).requires_grad_()
        largest = function(split)
        largest.backward()
        numbers[name] = largest.full_tensor().item(), split.grad.full_tensor().tolist()
    if rank == 0:
        torch.save(numbers, f"{folder}/numbers")
    dist.destroy_process_group()


if __name__ == "__main__":
    print("torch", torch.__version__.partition("+")[0])
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (folder,), nprocs=RANKS)
        numbers = torch.load(f"{folder}/numbers")
    right = [[0.0, 1.0], [0.0, 0.0], [0.0, 0.0]]
    for name, (value, gradient) in numbers.items():
        print(f"{name}: {value}, right 5.0; its gradient {gradient}, right {right}")
    sys.exit(any(gradient != right for _, gradient in numbers.values()))
