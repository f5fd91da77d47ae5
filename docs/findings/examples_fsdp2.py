"""pytorch/examples 77f55b9: FSDP2's example resets no layer, and trains from memory that nothing was written to.

EXAMPLES=checkout python docs/findings/examples_fsdp2.py        exit status 1 while the defect is there
"""

import os
import sys

import torch

sys.path.insert(0, os.path.join(os.environ["EXAMPLES"], "distributed", "FSDP2"))
from model import ModelArgs, Transformer

with torch.device("meta"):
    model = Transformer(ModelArgs())
model.to_empty(device="cpu")
for parameter in model.parameters():
    torch.nn.init.constant_(parameter, float("nan"))  # so that what memory held is seen
model.reset_parameters()
left = [name for name, parameter in model.named_parameters() if parameter.isnan().any()]
of_layers = [name for name, _ in model.named_parameters() if name.startswith("layers.")]
print(f"parameters that nothing was written to: {len(left)} of {len([*model.parameters()])}, right 0")
print(f"they are those of model.layers: {left == of_layers}")
sys.exit(bool(left))
