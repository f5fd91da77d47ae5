"""Megatron-Core 0.16.1 and 0.19.2: label smoothing of the vocabulary-parallel cross entropy is of a rank's own classes.

python docs/findings/megatron_smoothing.py        exit status 1 while the defect is there
"""

import sys
import tempfile
import warnings
from importlib.metadata import version

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

CLASSES, SMOOTHING = 8, 0.1


def right(logits, labels):  # Megatron's rule on one rank: 1 - s for the label, s / (K - 1) for each other class
    s = SMOOTHING * CLASSES / (CLASSES - 1)
    logs = logits.log_softmax(-1)
    return -(1 - s) * logs.gather(-1, labels[..., None])[..., 0] - s * logs.mean(-1)


def rank_main(rank, folder):
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.cuda.current_device = lambda: torch.device("cpu")
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    logits = torch.randn(3, 1, CLASSES, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[1], [5], [7]])
    part = logits.chunk(2, -1)[rank].clone()
    found, wanted = vocab_parallel_cross_entropy(part, labels, SMOOTHING).flatten(), right(logits, labels).flatten()
    torch.save((found, wanted), f"{folder}/{rank}")


if __name__ == "__main__":
    print("megatron-core", version("megatron-core"))
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (folder,), nprocs=2)
        losses = [torch.load(f"{folder}/{rank}") for rank in range(2)]
    for rank, (found, wanted) in enumerate(losses):
        print(f"rank {rank}: losses {found.tolist()}, right {wanted.tolist()}")
    sys.exit(not all(torch.allclose(found, wanted, atol=1e-5) for found, wanted in losses))
