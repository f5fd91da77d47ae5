"""Ranks of Megatron-Core, on real processes: they load a folder (where one is named) into their GPTModel and save it.

python -m tests.parallel.checkpoints.megatron_ranks TP SAVE [LOAD]
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.multiprocessing.spawn import spawn


def saved(folder: Path, tp: int, loaded: Path | None = None) -> None:
    """Save the model of so many ranks, as it is drawn or as another folder has it, by `dist_checkpointing`."""
    folder.mkdir()
    words = [sys.executable, "-m", __name__, str(tp), str(folder), *([str(loaded)] if loaded else [])]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def _rank(rank: int, tp: int, folder: str, loaded: str, store: str) -> None:
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=tp)
    with warnings.catch_warnings(action="ignore"), contextlib.redirect_stdout(sys.stderr):
        from megatron.core import dist_checkpointing, parallel_state  # noqa: PLC0415
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: PLC0415

        from suites.subjects import mcore, megatron  # noqa: PLC0415

        with megatron.session():
            parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
            model_parallel_cuda_manual_seed(1)
            model = mcore.build(SimpleNamespace(tp=tp, sp=False, llama=True, dtype="float32", seed=3)).module
            if loaded:
                for weight in model.parameters():
                    torch.nn.init.constant_(weight, torch.nan)
                model.load_state_dict(dist_checkpointing.load(model.sharded_state_dict(), loaded))
            dist_checkpointing.save(model.sharded_state_dict(), folder)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    ranks, target, source = int(sys.argv[1]), sys.argv[2], "".join(sys.argv[3:])
    spawn(_rank, (ranks, target, source, f"{target}.store"), nprocs=ranks)
