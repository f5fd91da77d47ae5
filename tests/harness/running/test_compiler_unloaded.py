"""A proof loads nothing of torch's compiler where nothing is compiled, and changes nothing once something is."""

from __future__ import annotations

import subprocess
import sys

import torch

PROGRAM = """
import sys, torch
from torch.utils.checkpoint import checkpoint
from harness.engines.threads.inproc import InprocEngine
from harness.running.proof import prove
from reference.case import Case

def stepped(kind):
    weight = torch.linspace(-1, 1, 7, dtype=torch.float64, requires_grad=True)
    optimizer = kind([weight], lr=0.1, weight_decay=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        (weight**3).sum().backward()
        optimizer.step()
    assert torch.is_grad_enabled()
    return weight.detach()

def recomputed():
    weight = torch.linspace(-1, 1, 7, dtype=torch.float64, requires_grad=True)
    checkpoint(torch.sin, checkpoint(torch.exp, weight, use_reentrant=False), use_reentrant=False).sum().backward()
    return weight.grad

with InprocEngine() as engine:
    case = Case.parse("mode=tp tp=2 layers=1 hidden=16 heads=2 ffn=16 seq=8 optimizer=adamw recompute=full")
    assert prove(case, "parallel.subject:subject", engine).verdict == "pass"
kinds = torch.optim.SGD, torch.optim.AdamW
before = [stepped(kind) for kind in kinds]
gradient = recomputed()
assert "torch._dynamo" not in sys.modules
assert torch._dynamo.config.error_on_nested_fx_trace is not None  # asked by anyone else, it is loaded
assert torch._dynamo is sys.modules["torch._dynamo"]
assert torch.equal(gradient, recomputed())
assert all(torch.equal(one, stepped(kind)) for one, kind in zip(before, kinds))
assert torch.optim.Optimizer.zero_grad.__wrapped__.__dynamo_disable.__module__.startswith("torch.")
assert checkpoint.__wrapped__.__dynamo_disable.__module__.startswith("torch.")
print(before[0].tolist())
"""


def test_optimizers_and_checkpoints_run_without_the_compiler_and_with_it_alike() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    weight = torch.linspace(-1, 1, 7, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1, weight_decay=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        (weight**3).sum().backward()
        optimizer.step()
    assert done.stdout.strip() == str(weight.tolist())
