"""DeepSpeed 0.19.8 on CPUs: AutoTP inference under torchrun ends in SIGSEGV on every rank.

python docs/findings/deepspeed_inference.py        exit status 1 while the defect is there
"""

import os
import sys
import tempfile
from importlib.metadata import version

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers

os.environ["DS_ACCELERATOR"] = "cpu"
TP = 2
SIZES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
SIZES |= {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 64}


def rank_main(rank, folder, local_size):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(TP), MASTER_ADDR="127.0.0.1")
    os.environ.update(MASTER_PORT="29518", USER=os.environ.get("USER", "nobody"), **local_size)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store{len(local_size)}", rank=rank, world_size=TP)
    import deepspeed

    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SIZES)).float()
    tokens = torch.arange(3, 16)[None]
    with torch.no_grad():
        right = model(input_ids=tokens).logits.clone()
        words = {"tensor_parallel": {"tp_size": TP}, "dtype": torch.float32, "replace_with_kernel_inject": False}
        found = deepspeed.init_inference(model, **words)(input_ids=tokens).logits
    sys.exit(not torch.allclose(found, right, atol=1e-4))


def ended(folder, **local_size):  # exit status of every rank
    processes = mp.spawn(rank_main, (folder, local_size), nprocs=TP, join=False).processes
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]


if __name__ == "__main__":
    print("deepspeed", version("deepspeed"))
    with tempfile.TemporaryDirectory() as folder:
        found = ended(folder)
        print(f"exit status of the ranks: {found}, right [0, 0]")
        print(f"with LOCAL_SIZE={TP} in the environment: {ended(folder, LOCAL_SIZE=str(TP))}")
    sys.exit(any(found))
