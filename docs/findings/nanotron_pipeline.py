"""nanotron 2411b022: in a pipeline the collator of Qwen2 raises on the last stage, and inner stages get another name.

NANOTRON=checkout python docs/findings/nanotron_pipeline.py        exit status 1 while the defect is there
"""

import os
import sys
import tempfile
from unittest.mock import MagicMock

import numpy
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

ABSENT = "flash_attn flash_attn.flash_attn_interface datasets datasets.download triton triton.language dacite numba "
ABSENT += "datasets.download.streaming_download_manager datatrove"
RIGHT = "input_ids, position_ids, label_ids, label_mask"


def rank_main(rank, world, folder):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    sys.modules.update({name: MagicMock(__version__="0") for name in ABSENT.split()})  # imported, and not used here
    sys.path.insert(0, os.environ["NANOTRON"] + "/src")
    torch.cuda.set_device = torch.cuda.device = lambda *_: None
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    from nanotron.data.clm_collator import DataCollatorForCLMWithPositionIds
    from nanotron.parallel import ParallelContext

    collate = DataCollatorForCLMWithPositionIds(4, 0, world - 1, ParallelContext(1, world, 1))
    try:
        found = ", ".join(collate([{"input_ids": numpy.arange(5)} if rank in (0, world - 1) else {}]))
    except Exception as problem:
        found = f"{type(problem).__name__}: {problem}"
    torch.save(found, f"{folder}/{rank}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (3, folder), nprocs=3)
        found = [torch.load(f"{folder}/{rank}") for rank in range(3)]
    for stage, names in enumerate(found):
        print(f"stage {stage} of 3: {names}; right {RIGHT}")
    sys.exit(found != [RIGHT] * 3)
