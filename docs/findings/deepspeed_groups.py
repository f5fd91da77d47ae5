"""DeepSpeed 0.19.8 on CPUs: inference_all_reduce(tensor, group=g) sums over all ranks and not over g.

python docs/findings/deepspeed_groups.py        exit status 1 while the defect is there

Four ranks in groups of two, LOCAL_SIZE as the deepspeed launcher sets it. AutoTP's row-parallel linear calls it.
"""

import os
import sys
import tempfile
from importlib.metadata import version

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

os.environ["DS_ACCELERATOR"] = "cpu"
WORLD = 4


def rank_main(rank, folder):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD), LOCAL_SIZE=str(WORLD))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29517", USER=os.environ.get("USER", "nobody"))
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    group = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    found, right = torch.full((64,), float(10**rank)), torch.full((64,), float(10**rank))
    deepspeed.comm.inference_all_reduce(found, group=group)
    dist.all_reduce(right, group=group)
    torch.save((found[0].item(), right[0].item()), f"{folder}/{rank}")


if __name__ == "__main__":
    print("deepspeed", version("deepspeed"))
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (folder,), nprocs=WORLD)
        sums = [torch.load(f"{folder}/{rank}") for rank in range(WORLD)]
    for rank, (found, right) in enumerate(sums):
        print(f"rank {rank}: {found:.0f}, right {right:.0f}")
    sys.exit(any(found != right for found, right in sums))
