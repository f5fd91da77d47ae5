"""transformers 5.23.0: weights of hrm_text as `from_pretrained` loads them, whole and under the model's own plan.

python docs/findings/transformers_loading.py        exit status 1 while the defect is there
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig

TP = 2
SIZES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "head_dim": 8}
SIZES |= {"num_attention_heads": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def load(folder, **words):
    model = AutoModelForCausalLM.from_pretrained(f"{folder}/model", dtype=torch.float64, **words)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    return {name: one.full_tensor() if hasattr(one, "full_tensor") else one for name, one in weights.items()}


def rank_main(rank, folder):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(TP))
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=TP)
    split = load(folder, distributed_config=DistributedConfig(tp_size=TP, tp_plan="auto"))
    if rank == 0:
        torch.save(split, f"{folder}/split")
    dist.destroy_process_group()


if __name__ == "__main__":
    print("transformers", transformers.__version__)
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(AutoConfig.for_model("hrm_text", **SIZES)).save_pretrained(f"{folder}/model")
        right = load(folder)
        mp.spawn(rank_main, (folder,), nprocs=TP)
        split = torch.load(f"{folder}/split")
    rows = {name: (split[name] != weight).any(1).sum().item() for name, weight in right.items() if weight.dim() == 2}
    wrong = {name: count for name, count in rows.items() if count}
    for name, count in wrong.items():
        if name.startswith("model.L_module"):
            print(f"{name}: {count} of {len(right[name])} rows differ from the checkpoint, right 0")
    sys.exit(len(wrong) > 0)
