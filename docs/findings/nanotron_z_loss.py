"""nanotron 2411b022: the z-loss of sharded_cross_entropy takes log Z after the maximum was subtracted.

NANOTRON=checkout python docs/findings/nanotron_z_loss.py        exit status 1 while the defect is there
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist

sys.path.insert(0, os.environ["NANOTRON"] + "/src")
os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
from nanotron.parallel.tensor_parallel.functional import sharded_cross_entropy

with tempfile.TemporaryDirectory() as folder:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    logits = torch.randn(3, 1, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    labels, wrong = torch.tensor([[1], [5], [7]]), False
    for shift in (0.0, 5.0):
        _, found = sharded_cross_entropy(logits + shift, labels, group=dist.group.WORLD, z_loss_coef=0.1)
        right = 0.1 * torch.logsumexp(logits + shift, -1) ** 2
        print(f"logits + {shift}: z-loss {found.flatten().tolist()}, right {right.flatten().tolist()}")
        wrong |= not torch.allclose(found.flatten(), right.flatten())
sys.exit(wrong)
