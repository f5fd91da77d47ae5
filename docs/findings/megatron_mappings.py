"""Megatron-Core 0.16.1: the sum over tp of a tensor that is not contiguous is thrown away (right in 0.19.2).

python docs/findings/megatron_mappings.py        exit status 1 while the defect is there
"""

import sys
import tempfile
import warnings
from importlib.metadata import version

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def rank_main(rank, folder):
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import mappings

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    found = mappings.reduce_from_tensor_model_parallel_region(torch.ones(3, 2).t())
    torch.save(found[0, 0].item(), f"{folder}/{rank}")


if __name__ == "__main__":
    print("megatron-core", version("megatron-core"))
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (folder,), nprocs=2)
        sums = [torch.load(f"{folder}/{rank}") for rank in range(2)]
    print(f"ones, summed over two ranks: {sums[0]:.0f} on rank 0, {sums[1]:.0f} on rank 1, right 2")
    sys.exit(sums != [2, 2])
