"""Dumps of ranks, as our recorder and NCCL's Flight Recorder write them, and what is found in them."""

import json
import pickle
from pathlib import Path
from typing import Any

from shardproof.harness.engines.calls.matching import Divergence, find_divergences
from shardproof.harness.hangs.dumps import standings
from shardproof.harness.hangs.hang_findings import lines


def found_in(*paths: Path) -> tuple[list[Divergence], str]:
    ranks = standings(paths)
    found = find_divergences(ranks)
    return found, "\n".join(lines(ranks, found))


def write_last(
    path: Path, rank: int, world: int, groups: dict[str, list[int]], kinds: list[Any], records: list[Any], **more: Any
) -> None:
    """The dump of a rank: the ranks of its groups, kinds of calls, and calls."""
    content = {
        "shardproof": "last calls", "ended": "", "rank": rank, "world_size": world, "silent_s": 60.0, "inside": [],
        "groups": {name: {"ranks": ranks} for name, ranks in groups.items()}, "kinds": kinds, "records": records,
        "stack": ["train.py:7 in main"], **more,
    }  # fmt: skip
    path.write_text(json.dumps(content))


def entry(
    number: int, group: tuple[str, str], op: str, sizes: list[list[int]], state: str, line: int
) -> dict[str, Any]:
    """An entry as NCCL's Flight Recorder writes it."""
    return {
        "record_id": number, "collective_seq_id": number, "p2p_seq_id": 0, "op_id": number, "pg_id": 0,
        "process_group": group, "profiling_name": f"nccl:{op}", "is_p2p": False, "state": state, "retired": False,
        "input_sizes": sizes, "input_dtypes": ["Float"], "output_sizes": sizes, "output_dtypes": ["Float"],
        "time_discovered_completed_ns": None, "time_created_ns": number,
        "frames": [
            {"name": "all_reduce", "filename": "/x/site-packages/torch/distributed/distributed_c10d.py", "line": 3},
            {"name": "forward", "filename": "/home/me/model.py", "line": line},
        ],
    }  # fmt: skip


def write_flight(folder: Path, *, as_json: bool, rank_1_calls: int) -> None:
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2]"}}
    for rank in range(3):
        calls = rank_1_calls if rank == 1 else 9
        entries = [
            entry(n, ("0", "default_pg"), "all_reduce", [[n, 4]], "completed" if n < 9 else "started", 10 + n)
            for n in range(4, calls + 1)
        ]
        dump = {"version": "2.10", "pg_config": config, "pg_status": {}, "entries": entries}
        path = folder / f"nccl_trace_rank_{rank}{'.json' if as_json else ''}"
        path.write_bytes(json.dumps(dump).encode() if as_json else pickle.dumps(dump))
