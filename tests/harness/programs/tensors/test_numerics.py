"""Float64 where a program says less: in backward too, where checkpointing computes forward once more."""

import subprocess
import sys

CHECKPOINTED = """
import torch
from torch.utils.checkpoint import checkpoint
from shardproof.harness.programs.session import ValueOptions
from shardproof.harness.programs.tensors.numerics import change_process, change_thread

options = ValueOptions(dtype="float64")
change_process(options)
change_thread(options)
seen = []
def norm(x):
    wide = x.to(torch.float32)
    seen.append(wide.dtype)
    return wide * wide.square().mean().rsqrt()
x = torch.randn(3, requires_grad=True)
checkpoint(norm, x, use_reentrant=False).sum().backward()
torch.autograd.backward(checkpoint(norm, x, use_reentrant=False).sum())
assert seen == [torch.float64] * 4, seen
"""


def test_what_checkpointing_computes_again_is_in_float64_too() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", CHECKPOINTED], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stderr
