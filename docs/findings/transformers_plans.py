"""transformers 5.23.0: tensor-parallel plans that ship with a model and train it wrongly, or not at all.

python docs/findings/transformers_plans.py apertus|llama4_text|doge|phi|cohere|inkling_text

Exit status 1 while the defect is there.
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
SIZES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 8}
SIZES |= {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 64, "use_cache": False}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
OWN = {"phi": {"qk_layernorm": True, "head_dim": None}, "cohere": {"use_qk_norm": True}}
OWN |= {"inkling_text": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}}
OWN["inkling_text"] |= {"swa_num_attention_heads": 8, "swa_num_key_value_heads": 4, "swa_head_dim": 8}


def gradients(model):
    tokens = torch.randint(3, 96, (3, 13), generator=torch.Generator().manual_seed(5))
    logits = model(input_ids=tokens[:, :-1]).logits
    cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    found = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return {name: one.full_tensor() if hasattr(one, "full_tensor") else one for name, one in found.items()}


def rank_main(rank, folder):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(TP))
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=TP)
    words = {"dtype": torch.float64, "experts_implementation": "eager"}
    right = gradients(AutoModelForCausalLM.from_pretrained(f"{folder}/model", **words))
    plan = DistributedConfig(tp_size=TP, tp_plan="auto")
    split = AutoModelForCausalLM.from_pretrained(f"{folder}/model", distributed_config=plan, **words)
    try:
        found = gradients(split)
    except RuntimeError as error:
        told = [f"{str(error).splitlines()[0]}; right no error"]
    else:
        wrong = {name: one for name, one in found.items() if not torch.allclose(one, right[name])}
        told = [
            f"{name}.grad {one.view(-1)[0]:.6f}, right {right[name].view(-1)[0]:.6f}" for name, one in wrong.items()
        ]
    torch.save(told, f"{folder}/{rank}")
    os._exit(0)  # after an error the other rank may wait


if __name__ == "__main__":
    print("transformers", transformers.__version__)
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        words = {name: size for name, size in (SIZES | OWN.get(sys.argv[1], {})).items() if size is not None}
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(sys.argv[1], **words), dtype=torch.float64)
        for weight in model.parameters():
            torch.nn.init.normal_(weight, std=0.1)
        model.save_pretrained(f"{folder}/model")
        mp.spawn(rank_main, (folder,), nprocs=TP)
        found = [torch.load(f"{folder}/{rank}") for rank in range(TP)]
    for rank, told in enumerate(found):
        print(f"rank {rank}:", "; ".join(told) or "right")
    sys.exit(any(found))
