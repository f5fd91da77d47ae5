"""What a proof costs beside what it cannot do without: rows of the performance table.

Programs that are compared take turns, each in a process of its own; counted is processor time, since machines are
shared.
"""

from __future__ import annotations

import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Mapping

from reference.language.modes import MODES

REAL_WIDTHS = (
    "layers=1 hidden=2048 heads=16 kv_heads=8 ffn=8192 vocab=8192 seq=256 batch=1 micro=1 steps=1 dtype=float32 tp=4"
)
_IMPORT = ("-c", "import torch")
_RANKS = f"""
import torch
from harness.engines.threads.inproc import InprocEngine
from harness.torch_internals.compiler import leave_unloaded
from harness.torch_internals.memory import keep_freed_memory
from parallel.subject import subject
from reference.model import parameters
from reference.case import Case

leave_unloaded()
keep_freed_memory()
torch.set_num_threads(1)
case = Case.parse("{REAL_WIDTHS}")
parameters._latest = lambda *_: {{}}
with InprocEngine() as engine:
    engine.run(lambda rank: subject(case, torch.device("cpu")), world_size=case.world_size, seed=case.seed)
"""
"""The ranks of a case alone: every one draws its own weights, as it would without others in its process."""


def one_case(rounds: int) -> tuple[float, float]:
    """CPU seconds of `shardproof run` of one case on 2 ranks, and its ratio to `import torch`."""
    best = _best({"import": _IMPORT, "case": _run("mode=tp tp=2")}, rounds)
    return best["case"], best["case"] / best["import"]


def further_case(rounds: int) -> float:
    """CPU seconds of every further case of a run."""
    few = [f"mode={mode} tp=2 micro=3" for mode in MODES if not MODES[mode].uneven]
    best = _best({"one": _run(few[0]), "six": _run(*few)}, rounds)
    return (best["six"] - best["one"]) / (len(few) - 1)


def real_widths() -> tuple[float, float]:
    """CPU seconds of a proof at real widths, and its ratio to its ranks' own; both without what a tiny case takes."""
    tiny = "mode=tp tp=2 layers=1 hidden=16 heads=2 ffn=16 seq=8"
    best = _best(
        {
            "start": _run(tiny),
            "proof": _run(REAL_WIDTHS),
            "no ranks": ("-c", re.sub("    engine.run.*", "    pass", _RANKS)),
            "ranks": ("-c", _RANKS),
        },
        1,
    )
    proof = best["proof"] - best["start"]
    return proof, proof / (best["ranks"] - best["no ranks"])


def _run(*cases: str) -> tuple[str, ...]:
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
