"""torch 2.13.0: loss_parallel() cannot be nested, and leaves its handlers behind when what is inside raises.

python docs/findings/torch_loss_parallel.py        exit status 1 while the defect is there
"""

import contextlib
import sys

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.distributed.tensor.parallel.loss import customized_loss_ops


def installed():
    return sum(op in DTensor._op_dispatcher._custom_op_handlers for op in customized_loss_ops)


def nested():
    try:
        with loss_parallel(), loss_parallel():
            pass
    except KeyError as error:
        return f"KeyError {error}"
    return "no error"


print("torch", torch.__version__.partition("+")[0])
with contextlib.suppress(RuntimeError), loss_parallel():
    raise RuntimeError("out of memory, or any other")
left = installed()
for op in customized_loss_ops:  # what was left behind would hide the other one
    DTensor._op_dispatcher._custom_op_handlers.pop(op, None)
inside = nested()
print(f"handlers after an exception inside: {left}, right 0")
print(f"one inside another: {inside}, right no error")
sys.exit(left > 0 or inside != "no error")
