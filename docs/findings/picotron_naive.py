"""picotron 59714b1: DataParallelNaive averages parameters, and gradients never.

PICOTRON=checkout python docs/findings/picotron_naive.py        exit status 1 while the defect is there
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def rank_main(rank, folder):
    os.environ.update(FLASH_ATTEN="0", DEVICE="cpu", DTYPE="float32", LOCAL_RANK=str(rank))
    sys.path.insert(0, os.environ["PICOTRON"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    from picotron.data_parallel.data_parallel import DataParallelNaive
    from picotron.process_group_manager import setup_process_group_manager

    setup_process_group_manager(1, 1, 1, 2)
    model = DataParallelNaive(torch.nn.Linear(3, 1, bias=False))
    model(torch.full((1, 3), float(rank + 1))).sum().backward()
    torch.save(model.module.weight.grad[0, 0].item(), f"{folder}/{rank}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (folder,), nprocs=2)
        found = [torch.load(f"{folder}/{rank}") for rank in range(2)]
    print(f"gradient {found[0]} on rank 0, {found[1]} on rank 1, right 1.5: the mean of both")
    sys.exit(found != [1.5, 1.5])
