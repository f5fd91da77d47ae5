"""torchtitan 0.3.0 (Python 3.12): with the default backend a vocabulary that tp does not divide has a row too many.

python docs/findings/torchtitan_vocabulary.py        exit status 1 while the defect is there
"""

import os
import sys
import tempfile
import types
from importlib.metadata import version

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

ROWS, TP = 2047, 2
NAME = "tok_embeddings.weight"


def rank_main(rank, folder):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(TP))
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=TP)
    from torchtitan.tools import utils as tools

    tools.device_type, tools.device_module = "cpu", torch.cpu  # before the others read it: "cuda" without a GPU
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims, utils
    from torchtitan.models import llama3

    utils.set_spmd_backend("spmd_types")
    config = llama3._debugmodel("flex")
    config.vocab_size = config.tok_embeddings.num_embeddings = config.lm_head.out_features = ROWS
    words = {"tensor_parallel_degree": TP, "data_parallel_shard_degree": 1, "spmd_backend": "spmd_types"}
    parallelism = ParallelismConfig(**words)
    config.update_from_config(config=types.SimpleNamespace(parallelism=parallelism))
    with torch.device("meta"):
        model = config.build()
    dims = ParallelDims.from_config(parallelism, TP)
    dims.build_mesh()
    model = llama3.parallelize_llama(
        model,
        parallel_dims=dims,
        training=TrainingConfig(mixed_precision_param="float32"),
        parallelism=parallelism,
        compile_config=CompileConfig(enable=False),
        ac_config=None,
        dump_folder=folder,
    )
    torch.save(tuple(dict(model.named_parameters())[NAME].shape), f"{folder}/{rank}")
    os._exit(0)


if __name__ == "__main__":
    print("torchtitan", version("torchtitan"))
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (folder,), nprocs=TP)
        shapes = [torch.load(f"{folder}/{rank}") for rank in range(TP)]
    print(f"rows of {NAME}: {shapes[0][0]} on rank 0, {shapes[1][0]} on rank 1, right {ROWS}")
    sys.exit(any(shape[0] != ROWS for shape in shapes))
