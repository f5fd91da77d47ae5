"""Dumps of ranks, as our recorder and NCCL's Flight Recorder write them, and what is found in them."""

import itertools
import json
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from shardproof.harness.engines.calls.matching import Divergence, find_divergences
from shardproof.harness.traces.hangs import lines_of_findings, read_standings


def found_in(*paths: Path) -> tuple[list[Divergence], str]:
    ranks = read_standings(paths)
    found = find_divergences(ranks)
    return found, "\n".join(lines_of_findings(ranks, found))


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


WORLD = ("0", "default_pg")


class Recorded:
    """The entries of one rank, numbered as torch's Flight Recorder numbers them (FlightRecorder.hpp 2.10).

    A batch of messages has one `p2p_seq_id`, and a coalesced call one `collective_seq_id`; each member is an entry, and
    the entry that ends them has no sizes. No member's state is ever updated.
    """

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []
        self.collectives = self.batches = 0

    def call(
        self, op: str, sizes: Sequence[list[int]], outputs: Sequence[list[int]] | None = None, state: str = "completed"
    ) -> "Recorded":
        self.collectives += 1
        return self._add(op, sizes, sizes if outputs is None else outputs, state)

    def coalesced(self, op: str, *sizes: list[int], member: str = "_broadcast_oop", ends: bool = True) -> "Recorded":
        self.collectives += 1
        for size in sizes:
            self._add(member, [size], [size], "scheduled")
        return self._add(op, [], [], "completed") if ends else self

    def batch(self, *messages: tuple[str, list[int]], state: str = "completed", ends: bool = True) -> "Recorded":
        self.batches += 1
        for op, size in messages:
            self._add(op, [size], [size], "scheduled", is_p2p=True)
        return self._add("coalesced", [], [], state, is_p2p=True) if ends else self

    def message(self, op: str, size: list[int], state: str = "completed") -> "Recorded":
        self.batches += 1
        return self._add(op, [size], [size], state, is_p2p=True)

    def _add(
        self, op: str, inputs: Sequence[list[int]], outputs: Sequence[list[int]], state: str, *, is_p2p: bool = False
    ) -> "Recorded":
        number = len(self.entries)
        one = entry(number, WORLD, op, list(inputs), state, 10 + number)
        changed = {"collective_seq_id": self.collectives, "p2p_seq_id": self.batches, "output_sizes": list(outputs)}
        dtypes = {"input_dtypes": ["Float"] * len(inputs), "output_dtypes": ["Float"] * len(outputs)}
        self.entries.append({**one, **changed, **dtypes, "is_p2p": is_p2p})
        return self


def write_entries(folder: Path, *ranks: list[dict[str, Any]]) -> Path:
    """The dumps of ranks of one group with these entries."""
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": str([*range(len(ranks))])}}
    folder.mkdir()
    for rank, entries in enumerate(ranks):
        dump = {"version": "2.10", "pg_config": config, "entries": entries}
        (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(dump))
    return folder


def right_job(rank: int, world: int, batch_end: str, keep: int = 0) -> list[dict[str, Any]]:
    """A rank of a healthy job whose members come in another order on every rank, where that is legal."""
    root = rank == 0
    others = [other for other in range(world) if other != rank]
    sizes = {frozenset(pair): [3 + sum(pair), 2] for pair in itertools.permutations(range(world), 2)}
    batch = [(f"send {rank}->{other}", sizes[frozenset((rank, other))]) for other in others]
    batch += [(f"recv {rank}<-{other}", sizes[frozenset((rank, other))]) for other in reversed(others)]
    batch = batch[rank:] + batch[:rank]  # messages of different pairs, and of both ways, have no order
    job = Recorded().coalesced("ALLGATHER_coalesced", [4, 4], [5, 5], [1]).batch(*batch, state=batch_end)
    job.call("scatter", [[4]] * world if root else [[0]], [[4]])  # an undefined tensor has the shape 0
    job.call("gather", [[4]], [[4]] * world if root else [[0]])
    job.call("all_to_all", [[rank + 1, 2]], [[2 * world - rank, 2]])
    job.call("_reduce_scatter_base", [[6]], [[2]]).call("all_gather_v", [[rank + 1]], [[1 + n] for n in range(world)])
    job.coalesced("coalesced", [2], [], member="broadcast").batch(*reversed(batch), state=batch_end)
    job.call("barrier", [[1]])
    return job.entries[keep:]


def leaves(value: Any, *path: Any) -> Iterator[tuple[Any, ...]]:
    """The path to every value in nested dicts and lists."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in items:
        yield from leaves(part, *path, key)
