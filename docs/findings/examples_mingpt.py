"""pytorch/examples 77f55b9: every rank of minGPT-ddp splits the data otherwise, so ranks train on each other's tests.

EXAMPLES=checkout python docs/findings/examples_mingpt.py        exit status 1 while the defect is there
"""

import os
import sys
import tempfile
import types

import torch
import torch.multiprocessing as mp
from torch.utils.data.distributed import DistributedSampler


def rank_main(rank, folder):
    for name in ("boto3", "hydra", "omegaconf"):  # imported, and not used here
        sys.modules[name] = types.ModuleType(name)
    sys.modules["hydra"].main = lambda **_: lambda function: function
    sys.modules["omegaconf"].DictConfig = dict
    sys.path.insert(0, os.path.join(os.environ["EXAMPLES"], "distributed", "minGPT-ddp", "mingpt"))
    from char_dataset import DataConfig
    from main import get_train_objs
    from model import GPTConfig, OptimizerConfig

    data = DataConfig(path=f"{folder}/text", block_size=16, train_split=0.9, truncate=1.0)
    sizes = GPTConfig(n_layer=1, n_head=1, n_embd=8)
    *_, train, test = get_train_objs(sizes, OptimizerConfig(), data)
    read = [train.indices[place] for place in DistributedSampler(train, 2, rank)]
    torch.save((read, [*test.indices]), f"{folder}/{rank}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        with open(f"{folder}/text", "w") as file:
            file.write("to be or not to be " * 53)
        mp.spawn(rank_main, (folder,), nprocs=2)
        (one, tests), (other, others) = (torch.load(f"{folder}/{rank}") for rank in range(2))
    twice, seen = len({*one} & {*other}), len(({*one} & {*others}) | ({*other} & {*tests}))
    print(f"samples that both ranks read in an epoch: {'some' if twice else 'none'}, right none")
    print(f"samples that one rank trains on and the other tests with: {'some' if seen else 'none'}, right none")
    sys.exit(bool(twice or seen))
