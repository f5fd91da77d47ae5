"""torch 2.13.0: a module that is called twice under one CommDebugMode raises IndexError.

python docs/findings/torch_comm_debug.py        exit status 1 while the defect is there
"""

import sys

import torch
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

model, calls = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), 0
print("torch", torch.__version__.partition("+")[0])
try:
    with CommDebugMode():
        for _ in range(2):  # two micro-batches
            model(torch.ones(2, 4))
            calls += 1
except IndexError as error:
    print(f"forward passes before IndexError ({error}): {calls}, right 2 and no error")
sys.exit(calls < 2)
