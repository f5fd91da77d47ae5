"""Megatron-Core 0.16.1: the router of experts needs TransformerEngine, which the local spec does not.

python docs/findings/megatron_router.py        exit status 1 while the defect is there
"""

import sys
import warnings
from importlib.metadata import version

import torch

with warnings.catch_warnings(action="ignore"):
    from megatron.core.transformer.moe.moe_utils import router_gating_linear

print("megatron-core", version("megatron-core"))
tokens, weight = torch.ones(2, 4), torch.ones(3, 4)
try:
    found = router_gating_linear(tokens, weight, None, torch.float32)
except NameError as error:
    print(f"NameError: {error}; right {(tokens @ weight.T)[0, 0]:.0f} in every place")
    sys.exit(1)
print(f"{found[0, 0]:.0f} in every place, right 4")
