"""picotron 59714b1: gradients of a pipeline are grad_acc_steps times those without one.

PICOTRON=checkout python docs/findings/picotron_stages.py        exit status 1 while the defect is there
"""

import os
import sys
import tempfile
import types
import zlib

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.functional import cross_entropy

STEPS = 4
FLASH = {"flash_attn": (), "flash_attn.flash_attn_interface": ("flash_attn_func",), "flash_attn.layers": ()}
FLASH |= {"flash_attn.layers.rotary": ("apply_rotary_emb",), "flash_attn.ops": (), "flash_attn.ops.triton": ()}
FLASH |= {"flash_attn.ops.triton.layer_norm": ("layer_norm_fn",)}
SIZES = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 32}
SIZES |= {"vocab_size": 32, "rms_norm_eps": 1e-5, "num_hidden_layers": 2, "max_position_embeddings": 8}
SIZES |= {"rope_theta": 1e4}


class Loader:
    grad_acc_steps = STEPS

    def __init__(self):
        self.draws = torch.Generator().manual_seed(0)

    def __next__(self):
        tokens = torch.randint(32, (2, 9), generator=self.draws)
        return {"input_ids": tokens[:, :-1], "target_ids": tokens[:, 1:], "position_ids": torch.arange(8)}


def rank_main(rank, world, folder):
    os.environ.update(FLASH_ATTEN="0", DEVICE="cpu", DTYPE="float32", LOCAL_RANK=str(rank), CONTEXT_PARALLEL="0")
    for name, words in FLASH.items():  # imported, and not used on a CPU
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__dict__.update(dict.fromkeys(words))
    sys.path.insert(0, os.environ["PICOTRON"])
    torch.cuda.synchronize = lambda *_: None
    dist.init_process_group("gloo", init_method=f"file://{folder}/store{world}", rank=rank, world_size=world)
    from picotron.model import Llama
    from picotron.pipeline_parallel.pipeline_parallel import PipelineParallel, train_step_pipeline_1f1b
    from picotron.process_group_manager import setup_process_group_manager

    setup_process_group_manager(1, 1, world, 1)
    config, loader = types.SimpleNamespace(**SIZES), Loader()
    model = Llama(config) if world == 1 else PipelineParallel(Llama(config), config)
    for name, weight in model.named_parameters():
        draws = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        weight.data = 0.2 * torch.randn(weight.shape, generator=draws)
    if world > 1:
        train_step_pipeline_1f1b(model, loader, (2, 8, 16), torch.device("cpu"), torch.float32)
    for _ in range(STEPS if world == 1 else 0):  # train_step of train.py, which imports wandb
        batch = next(loader)
        logits = model(batch["input_ids"]).flatten(0, 1)
        (cross_entropy(logits, batch["target_ids"].flatten()) / STEPS).backward()
    torch.save({name: weight.grad for name, weight in model.named_parameters()}, f"{folder}/{world}.{rank}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        for world in (1, 2):
            mp.spawn(rank_main, (world, folder), nprocs=world)
        right = torch.load(f"{folder}/1.0")
        found = torch.load(f"{folder}/2.0") | torch.load(f"{folder}/2.1")
    factors = [(found[name].norm() / right[name].norm()).item() for name in right]
    print(f"gradients with a pipeline are {min(factors):.4f} to {max(factors):.4f} times those without, right 1")
    sys.exit(max(factors) > 1.01)
