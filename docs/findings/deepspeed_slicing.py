"""DeepSpeed 0.19.8: fused q, k, v weights are cut into thirds where key heads are fewer, or lie head by head.

python docs/findings/deepspeed_slicing.py [gqa] [persimmon]      exit status 1 while the defect is there

Needs no ranks: rows carry their number, and a rank's slice is compared with the rows of its own heads.
"""

import os
import sys
from importlib.metadata import version

os.environ["DS_ACCELERATOR"] = "cpu"
import torch
from deepspeed.module_inject.auto_tp import ReplaceWithTensorSlicing
from deepspeed.module_inject.fusedqkv_utils import prepare_tp_fused_qkvw
from deepspeed.module_inject.tp_shard import AutoTPMeta

TP, WIDTH = 2, 6


class PersimmonDecoderLayer(torch.nn.Module):
    """DeepSpeed looks at its name."""


def rows(count):
    return torch.arange(float(count * WIDTH))[:, None].expand(-1, count * WIDTH).contiguous()


def gqa(rank, heads=4, key_heads=2):  # [all q; all k; all v]
    fused = rows(heads + 2 * key_heads)
    parts = fused.split([heads * WIDTH, key_heads * WIDTH, key_heads * WIDTH])
    slicing = ReplaceWithTensorSlicing(mp_size=TP, out_dim=0, in_dim=1)
    slicing.gpu_index = rank
    right = torch.cat([part.chunk(TP)[rank] for part in parts])
    try:
        found = slicing.strided_copy(torch.empty_like(right), fused, num_splits=3, int8=True).data
    except (RuntimeError, AssertionError) as error:
        return str(error).splitlines()[0], right[:, 0].long().tolist()
    return found[:, 0].long().tolist(), right[:, 0].long().tolist()


def persimmon(rank, heads=4):  # [q, k, v of head 0; q, k, v of head 1; ...]
    fused = rows(3 * heads)
    meta = AutoTPMeta(num_kv_heads=heads, num_attention_heads=heads, n_embd=heads * WIDTH)
    found = prepare_tp_fused_qkvw(PersimmonDecoderLayer(), fused, TP, rank, meta)
    return found[:, 0].long().tolist(), fused.chunk(TP)[rank][:, 0].long().tolist()


print("deepspeed", version("deepspeed"))
wrong = False
for kind in sys.argv[1:] or ("gqa", "persimmon"):
    for rank in range(TP):
        found, right = {"gqa": gqa, "persimmon": persimmon}[kind](rank)
        print(f"{kind} rank {rank}: rows {found}, right {right}")
        wrong |= found != right
sys.exit(wrong)
