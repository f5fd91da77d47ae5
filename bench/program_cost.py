"""What recording a whole program costs: its step recorded over the same step unrecorded, in pairs that take turns.

The program has BERT-small's shape (4 layers, hidden 512, 8 heads, vocabulary 30522) and trains under
DistributedDataParallel in a gloo world of one rank, in a process of its own. Counted is processor time, since machines
are shared. Source of the shape: arXiv:1908.08962.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from harness.programs.part import Part
from harness.programs.rank import RankRecorder
from harness.programs.session import ProgramSession
from harness.recording.recorder import Recorded
from reports.comparing.intervals import Interval, ratio_of_medians

LAYERS, HIDDEN, HEADS, VOCAB, SEQ = 4, 512, 8, 30522, 128


def recorded_step(pairs: int) -> tuple[float, Interval]:
    """CPU seconds of a recorded step (median), and its ratio to an unrecorded one with its interval."""
    command = [sys.executable, "-m", "bench.program_cost", str(pairs)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    seconds = json.loads(done.stdout.splitlines()[-1])
    off, on = (np.array(seconds[name]) for name in ("off", "on"))
    return float(np.median(on)), ratio_of_medians(off, on)


def _training() -> Callable[[], None]:
    """One step of the program."""
    layer = nn.TransformerEncoderLayer(HIDDEN, HEADS, 4 * HIDDEN, batch_first=True, dropout=0.0)
    stack = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
    model = DistributedDataParallel(nn.Sequential(nn.Embedding(VOCAB, HIDDEN), stack, nn.Linear(HIDDEN, VOCAB)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    tokens = torch.randint(0, VOCAB, (1, SEQ))

    def step() -> None:
        nn.functional.cross_entropy(model(tokens).view(-1, VOCAB), tokens.view(-1)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def main(pairs: int) -> None:
    """Print the seconds of both kinds of step as JSON. Raises RuntimeError when the calls were not recorded."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        session = ProgramSession(
            folder=folder, steps=None, profile=(), silence_s=60.0, origin_s=time.perf_counter(), boot="", command=()
        )
        of = Recorded(case="bert-small", mode="program", world_size=1, rank=0)
        recorder = RankRecorder(session, of, Part(Path(folder), 0, {}), session.origin_s)
        step = _training()
        seconds: dict[str, list[float]] = {"off": [], "on": []}
        for pair in range(pairs + 2):
            for name in ("off", "on") if pair % 2 else ("on", "off"):
                with recorder if name == "on" else nullcontext():
                    begin_s = time.process_time()
                    step()
                    spent_s = time.process_time() - begin_s
                if pair >= 2:  # the first ones warm up
                    seconds[name].append(spent_s)
        calls = len((Path(folder) / "ranks" / "0" / "ledger.csv").read_text().splitlines()) - 1
        if calls < pairs:
            raise RuntimeError(f"{calls} calls were recorded in {pairs} steps: this would time something else")
        dist.destroy_process_group()
    print(json.dumps(seconds))


if __name__ == "__main__":
    main(int(sys.argv[1]))
