"""transformers 5.23.0: gradients of replicated weights grow with the micro-batches under tp_plan="auto".

python docs/findings/transformers_accumulation.py        exit status 1 while the defect is there
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig

TP = 2
SIZES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "head_dim": 8}
SIZES |= {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 64}
NAME = "model.layers.0.self_attn.q_norm.weight"


def gradient(model, micros):  # of one weight, summed over micro-batches
    for micro in range(micros):
        tokens = torch.randint(96, (2, 16), generator=torch.Generator().manual_seed(micro))
        logits = model(input_ids=tokens).logits
        cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    found = dict(model.named_parameters())[NAME].grad
    return found.full_tensor() if hasattr(found, "full_tensor") else found


def rank_main(rank, folder):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(TP))
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=TP)
    plan, norms = DistributedConfig(tp_size=TP, tp_plan="auto"), []
    for micros in (1, 2, 3):
        path = f"{folder}/model"
        right = gradient(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64), micros)
        split = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, distributed_config=plan)
        norms.append((gradient(split, micros).norm().item(), right.norm().item()))
    torch.save(norms, f"{folder}/{rank}")


if __name__ == "__main__":
    print("transformers", transformers.__version__)
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **SIZES))
        model.double().save_pretrained(f"{folder}/model")
        mp.spawn(rank_main, (folder,), nprocs=TP)
        norms = torch.load(f"{folder}/0")
    for micros, (found, right) in enumerate(norms, 1):
        print(f"{micros} micro-batches: norm of {NAME}.grad {found:.6f}, right {right:.6f}")
    sys.exit(any(abs(found - right) > 1e-9 for found, right in norms))
