"""The process of a profiling session: it runs the cases of FOLDER/job.pickle.

    python -m shardproof.child harness.witnesses.child FOLDER

It stands between the command and the ranks so that a tool can be put around it. Ranks are spawned, one set of processes
for all cases of a world size, and end in good order: a tool loses what a killed process saw last. Every rank leaves
FOLDER/<case>/rank<r>.pickle, a `RankResult`. Exit status 0 when every rank came to its end.
"""

from __future__ import annotations

import pickle
import time
from pathlib import Path

from torch import multiprocessing
from torch.distributed import FileStore, PrefixStore

from harness.engines.processes.rank_program import run_rank
from harness.interpreter import spawned
from harness.protocols import CaseLike
from harness.witnesses.measured import Measurement, measure
from harness.witnesses.session import SessionRequest

START_S = 60.0
"""The processes of the ranks start and import: a busy machine takes its time."""


def main(word: str) -> int:
    """Run the job of this folder; 1 when a rank did not come to its end in time."""
    folder = Path(word)
    left = folder / "job.pickle"
    job: SessionRequest = pickle.loads(left.read_bytes())
    left.unlink()
    by_world: dict[int, list[int]] = {}
    for index, case in enumerate(job.cases):
        by_world.setdefault(case.world_size, []).append(index)
    start = multiprocessing.get_context("spawn")
    ended_well = True
    for world_size, indices in by_world.items():
        limit_s = time.monotonic() + START_S + job.timeout_s * len(indices)
        chosen = [(index, job.cases[index]) for index in indices]
        target, words = spawned(_rank), (world_size, folder, job, chosen)
        ranks = [start.Process(target=target, args=(rank, *words)) for rank in range(world_size)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(max(limit_s - time.monotonic(), 0.0))
        for process in ranks:
            ended_well &= process.exitcode == 0
            if process.is_alive():
                process.kill()
                process.join()
    return 0 if ended_well else 1


def _rank(rank: int, world_size: int, folder: Path, job: SessionRequest, cases: list[tuple[int, CaseLike]]) -> None:
    """All cases of one world size on one rank."""
    store = FileStore(str(folder / f"store{world_size}"), world_size)
    for index, case in cases:
        measurement = Measurement(
            case=case,
            subject=job.subject,
            device=job.device,
            tool=job.tool,
            folder=str(folder / str(index)),
            warmup=job.warmup,
            repeats=job.repeats,
            steps=job.steps,
        )
        own = PrefixStore(f"case{index}", store)
        end = run_rank(
            measure,
            (measurement,),
            rank=rank,
            world_size=world_size,
            store=own,
            seed=case.seed,
            timeout_s=job.timeout_s,
        )
        (folder / str(index) / f"rank{rank}.pickle").write_bytes(pickle.dumps(end))
