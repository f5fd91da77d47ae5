"""What a proof costs beside its indispensable parts, and what recording a program costs.

Programs that are compared take turns, each in a process of its own. Processor time is counted, since machines are
shared. The recorded program has BERT-small's shape (4 layers, hidden 512, 8 heads, vocabulary 30522; arXiv:1908.08962).
The program trains under DistributedDataParallel in a gloo world of one rank.
"""

import json
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardproof.harness.programs.part import Part
from shardproof.harness.programs.rank import RankRecorder
from shardproof.harness.programs.session import ProgramSession
from shardproof.harness.recording.recorder import Recorded
from shardproof.reference.language.core import MODES
from shardproof.reports.comparing.intervals import Interval, ratio_of_medians

REAL_WIDTHS = (
    "layers=1 hidden=2048 heads=16 kv_heads=8 ffn=8192 vocab=8192 seq=256 batch=1 micro=1 steps=1 dtype=float32 tp=4"
)
_IMPORT = ("-c", "import torch")
_RANKS = f"""
import torch
from shardproof.harness.engines.threads.inproc import InprocEngine
from shardproof.harness.torch_internals.compiler import leave_unloaded
from shardproof.parallel.subject import subject
from shardproof.reference.model import parameters
from shardproof.reference.case import Case

leave_unloaded()
torch.set_num_threads(1)
case = Case.parse("{REAL_WIDTHS}")
parameters._latest = lambda *_: {{}}
with InprocEngine() as engine:
    engine.run(lambda rank: subject(case, torch.device("cpu")), world_size=case.world_size, seed=case.seed)
"""
"""A program that runs the ranks of a case and nothing else. Every rank draws its own weights, like a process would."""


def one_case(rounds: int) -> tuple[float, float]:
    """CPU seconds of `shardproof run` of one case on 2 ranks, and their ratio to those of `import torch`."""
    best = _best({"import": _IMPORT, "case": _words_of_run("mode=tp tp=2")}, rounds)
    return best["case"], best["case"] / best["import"]


def further_case(rounds: int) -> float:
    """CPU seconds of every further case of a run."""
    few = [f"mode={mode} tp=2 micro=3" for mode in MODES if not MODES[mode].uneven]
    best = _best({"one": _words_of_run(few[0]), "six": _words_of_run(*few)}, rounds)
    return (best["six"] - best["one"]) / (len(few) - 1)


def real_widths() -> tuple[float, float]:
    """CPU seconds of a proof at real widths, and their ratio to those of its ranks.

    The time of a tiny case is subtracted from the former, and that of the same program without ranks from the latter.
    """
    tiny = "mode=tp tp=2 layers=1 hidden=16 heads=2 ffn=16 seq=8"
    best = _best(
        {
            "start": _words_of_run(tiny),
            "proof": _words_of_run(REAL_WIDTHS),
            "no ranks": ("-c", re.sub("    engine.run.*", "    pass", _RANKS)),
            "ranks": ("-c", _RANKS),
        },
        1,
    )
    proof = best["proof"] - best["start"]
    return proof, proof / (best["ranks"] - best["no ranks"])


def _words_of_run(*cases: str) -> tuple[str, ...]:
    return ("-m", "shardproof", "run", "--out", tempfile.mkdtemp(), *cases)


def _best(programs: Mapping[str, tuple[str, ...]], rounds: int) -> dict[str, float]:
    """The least CPU seconds of every program. Raises CalledProcessError when one fails."""
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, words in programs.items():
            seconds[name].append(_cpu_s(words))
    return {name: min(found) for name, found in seconds.items()}


def _cpu_s(words: tuple[str, ...]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *words], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


LAYERS, HIDDEN, HEADS, VOCAB, SEQ = 4, 512, 8, 30522, 128


def recorded_step(pairs: int) -> tuple[float, Interval]:
    """CPU seconds of a recorded step (median), and its ratio to an unrecorded one with its interval."""
    command = [sys.executable, "-m", "bench.proof_costs", str(pairs)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    seconds = json.loads(done.stdout.splitlines()[-1])
    off, on = (np.array(seconds[name]) for name in ("off", "on"))
    return float(np.median(on)), ratio_of_medians(off, on)


def _make_training_step() -> Callable[[], None]:
    """A function that makes one training step of the recorded program."""
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
        step = _make_training_step()
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
