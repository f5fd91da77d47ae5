"""What parity costs, measured here: `python -m bench.parity_costs`.

A transformer of 10.5 million parameters trains on 8 rows of 128 tokens. Its steps 2 and 3 are recorded, the steps
around them are not. It prints the ratio of both in CPU time, and the time of copying and writing as many bytes. Then
`shardproof parity` launches it on one rank and on two data ranks, in float64 and float32. On two idle cores the time by
the clock is at most the CPU time.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from shardproof.harness.programs.values import safetensors_module

SCRIPT = """import os, time
import torch, torch.distributed as dist
from torch import nn

ranks = int(os.environ.get("WORLD_SIZE", "1"))
rank = int(os.environ.get("RANK", "0"))
torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True, norm_first=True)
stack = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
model = nn.Sequential(nn.Embedding(2048, 256), stack, nn.Linear(256, 2048))
if ranks > 1:
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(7):
    start_s = time.process_time()
    tokens = torch.randint(0, 2048, (8, 129), generator=torch.Generator().manual_seed(step))[rank::ranks]
    logits = model(tokens[:, :-1])
    nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print("seconds", time.process_time() - start_s, flush=True)
"""
RECORDED = (2, 3)


def _run(folder: Path, *words: str) -> tuple[str, float, float]:
    """What a command of shardproof printed, its CPU seconds and those of the clock. Raises CalledProcessError."""
    before, start_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [sys.executable, "-m", "shardproof", *words]
    words_of_threads = {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=folder, check=True, capture_output=True, text=True, env={**os.environ, **words_of_threads}
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return done.stdout, cpu_s, time.perf_counter() - start_s


def _copying_seconds(file: Path, folder: Path) -> float:
    """CPU seconds of copying the tensors of a file once, and of writing them."""
    files = safetensors_module().torch
    tensors = files.load_file(file)
    start_s = time.process_time()
    files.save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "copy.safetensors")
    return time.process_time() - start_s


def _show_steps(folder: Path, dtype: str) -> None:
    """Print what a recorded step costs beside an unrecorded one, with its copies and without."""
    words = ["--values", "--steps", f"{RECORDED[0]}:{RECORDED[-1] + 1}", *(["--dtype", dtype] if dtype else [])]
    out = f"recorded-{dtype}"
    printed, _, _ = _run(folder, "record", *words, "--out", out, "--", sys.executable, "train.py")
    seconds = [float(line.split()[1]) for line in printed.splitlines() if line.startswith("seconds ")]
    recorded = statistics.median(seconds[step] for step in RECORDED)
    plain = statistics.median(s for step, s in enumerate(seconds) if step and step not in RECORDED)
    file = next((folder / out).glob(f"*/values/rank-0.step-{RECORDED[-1]}.safetensors"))
    copies = _copying_seconds(file, folder)
    ratios = (
        f"{recorded / plain:.2f} x, {(recorded - copies) / plain:.2f} x beside copying {file.stat().st_size:,} bytes"
    )
    print(f"recorded step, {dtype or 'float32'}: {recorded:.2f} s over {plain:.2f} s, {ratios}", flush=True)


def _show_budget(folder: Path, gib: float) -> None:
    """Print how many bytes of a step are kept under a budget, and how many tensors it left out by name."""
    words = ["--values", "--steps", "0:1", "--budget", str(gib), "--out", "budget"]
    _run(folder, "record", *words, "--", sys.executable, "train.py")
    values = next((folder / "budget").glob("*/values"))
    rows = [json.loads(line) for line in (values / "rank-0.jsonl").read_text(encoding="utf-8").splitlines()]
    tensors = safetensors_module().torch.load_file(values / "rank-0.step-0.safetensors")
    kept = sum(tensor.nbytes for tensor in tensors.values())
    left = sum(bool(row["left_out"]) for row in rows)
    print(f"budget of {int(gib * 2**30):,} bytes: {kept:,} kept, {left} of {len(rows)} tensors left out", flush=True)


def main(dtypes: Sequence[str] = ("float64", "")) -> int:
    """Print all of it. Returns 0; raises CalledProcessError where a launch fails or parity does not pass."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(SCRIPT, encoding="utf-8")
        for dtype in dtypes:
            _show_steps(folder, dtype)
        _show_budget(folder, 0.1)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
        for dtype in dtypes:
            words = ["--timeout", "1200", *(["--dtype", dtype] if dtype else [])]
            _, cpu_s, clock_s = _run(folder, "parity", *words, "--", sys.executable, "train.py", "--", *torchrun)
            print(f"parity, {dtype or 'float32'}: {cpu_s:.0f} s of processor, {clock_s:.0f} s of the clock", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
