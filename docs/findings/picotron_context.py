"""picotron 59714b1: with cp_size above 1 and dp_size 1, train.py never sums gradients over the ranks of a sequence.

PICOTRON=checkout python docs/findings/picotron_context.py        exit status 1 while the defect is there
"""

import ast
import os
import sys
import tempfile
import types
import zlib
from pathlib import Path
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn import functional

FLASH = "flash_attn flash_attn.flash_attn_interface flash_attn.layers flash_attn.layers.rotary flash_attn.ops "
FLASH += "flash_attn.ops.triton flash_attn.ops.triton.layer_norm"
SIZES = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 32}
SIZES |= {"vocab_size": 32, "rms_norm_eps": 1e-5, "num_hidden_layers": 2, "max_position_embeddings": 8}
SIZES |= {"rope_theta": 1e4}


def of_train(names):  # train_step of train.py, and its statement that wraps the model; train.py itself needs wandb
    tree = ast.parse(Path(os.environ["PICOTRON"], "train.py").read_text())
    step = next(node for node in tree.body if getattr(node, "name", "") == "train_step")
    wraps = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "DataParallelBucket" in ast.unparse(node)]
    for node in (step, min(wraps, key=lambda node: len(ast.unparse(node)))):
        exec(compile(ast.Module([node], []), "train.py", "exec"), names)
    return names["train_step"], names["model"]


def rank_main(rank, world, folder):
    os.environ.update(FLASH_ATTEN="0", DEVICE="cpu", DTYPE="float32", LOCAL_RANK=str(rank))
    sys.modules.update({name: MagicMock() for name in FLASH.split()})  # imported, and not used on a CPU
    sys.path.insert(0, os.environ["PICOTRON"])
    torch.cuda.synchronize = lambda *_: None
    dist.init_process_group("gloo", init_method=f"file://{folder}/store{world}", rank=rank, world_size=world)
    import picotron.process_group_manager as pgm
    from picotron.context_parallel.context_parallel import apply_context_parallel
    from picotron.data_parallel.data_parallel import DataParallelBucket
    from picotron.model import Llama

    pgm.setup_process_group_manager(1, world, 1, 1)
    model = apply_context_parallel(Llama(types.SimpleNamespace(**SIZES)))
    for name, weight in model.named_parameters():
        draws = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        weight.data = 0.2 * torch.randn(weight.shape, generator=draws)
    names = {"pgm": pgm, "DataParallelBucket": DataParallelBucket, "F": functional, "model": model}
    train_step, wrapped = of_train(names)
    tokens = torch.randint(32, (2, 9), generator=torch.Generator().manual_seed(0))
    part = slice(rank * 8 // world, (rank + 1) * 8 // world)
    loader = iter([{"input_ids": tokens[:, :-1][:, part], "target_ids": tokens[:, 1:][:, part]}])
    names["next"] = lambda loader: next(loader.batches)
    train_step(wrapped, types.SimpleNamespace(grad_acc_steps=1, batches=loader), torch.device("cpu"))
    torch.save(model.final_norm.weight.grad, f"{folder}/{world}.{rank}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        for world in (1, 2):
            mp.spawn(rank_main, (world, folder), nprocs=world)
        right, *found = (torch.load(f"{folder}/{name}").norm().item() for name in ("1.0", "2.0", "2.1"))
    print(f"norm of final_norm.weight.grad: {found[0]:.6f} on rank 0, {found[1]:.6f} on rank 1, right {right:.6f}")
    sys.exit(any(abs(one - right) > 1e-5 for one in found))
