"""Traces as the torch profiler writes them on GPUs, made here: a job's calls as rows of host and device."""

import json
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

Json = dict[str, Any]
NAMES = {
    "all_reduce": "allreduce",
    "all_gather": "_allgather_base",
    "reduce_scatter": "_reduce_scatter_base",
    "broadcast": "broadcast",
    "all_to_all": "all_to_all",
    "send": "send",
    "recv": "recv",
}
DTYPES = {"float32": ("Float", 4), "float64": ("Double", 8), "bfloat16": ("BFloat16", 2), "int64": ("Long", 8)}
DTYPES |= {"bool": ("Bool", 1)}
_IDS = count(1)


def row(name: str, category: str, start_us: float, spent_us: float, tid: int = 1, **args: Any) -> Json:
    made = {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": tid, "ts": start_us, "dur": spent_us}
    return {**made, "args": {"External id": next(_IDS), **args}}


def step(number: int, start_us: float, spent_us: float) -> Json:
    return row(f"ProfilerStep#{number}", "user_annotation", start_us, spent_us)


def call(
    op: str,
    size: int,
    start_us: float,
    *,
    dtype: str = "float32",
    group: str = "0",
    ranks: Sequence[int] = (0, 1),
    kernel_us: float = 0.0,
    bare: bool = False,
    tid: int = 1,
    **args: Any,
) -> list[Json]:
    """The rows of a call of 10 us: operator (not if `bare`), fields, backend; its kernel; and its wait."""
    word, width = DTYPES[dtype]
    elements, members = size // width, max(1, len(ranks))
    fields: Json = {
        "Collective name": NAMES[op],
        "dtype": word,
        "In msg nelems": elements // members if op == "all_gather" else elements,
        "Out msg nelems": elements // members if op == "reduce_scatter" else elements,
        "Process Group Name": group,
        "Group size": members,
        "Process Group Ranks": str(list(ranks)) if len(ranks) <= 30 else "[0, 1, 2, ...]",
        **args,
    }
    told = row("record_param_comms", "cpu_op", start_us + 1, 8, tid, **fields)
    rows = [told, row(f"nccl:{op}", "user_annotation", start_us + 2, 6, tid)]
    rows += [] if bare else [row("c10d::allreduce_", "cpu_op", start_us, 10, tid)]
    waited: Json = {"Collective name": "wait", "dtype": "Byte"}
    rows += [row("record_param_comms", "cpu_op", start_us + 12, 1, tid, **waited)]
    if kernel_us:
        kernel = row("ncclDevKernel_Generic", "kernel", start_us + 20, kernel_us, 7)
        rows.append({**kernel, "args": {**kernel["args"], "External id": told["args"]["External id"]}})
    return rows


def trace(
    rows: Sequence[Json], rank: int | None = 0, world_size: int = 2, groups: Mapping[str, Sequence[int]] | None = None
) -> Json:
    config = [
        {"pg_name": name, "pg_desc": "default_pg" if name == "0" else name, "pg_size": len(ranks), "ranks": list(ranks)}
        for name, ranks in (groups or {"0": range(world_size)}).items()
    ]
    about: Json = {"backend": "nccl", "pg_config": config}
    about |= {} if rank is None else {"rank": rank, "world_size": world_size}
    return {"schemaVersion": 1, "distributedInfo": about, "traceEvents": list(rows), "traceName": "made"}


def written(path: Path, content: Json) -> Path:
    """Write a trace as the profiler lays it out."""
    events = ",\n  ".join(json.dumps(event) for event in content["traceEvents"])
    head = json.dumps({key: content[key] for key in ("schemaVersion", "distributedInfo")})[:-1]
    path.write_text(f'{head},\n  "traceEvents": [\n  {events}\n  ],\n  "traceName": "made"\n}}')
    return path


def two_steps(late_us: float = 0.0) -> list[Json]:
    """The steps 7 and 8 of a rank, whose kernels of an all_reduce are shorter by as much as it is late."""
    rows = [step(7, 0, 200), step(8, 200, 200), row("gemm", "kernel", 30, 10, 9)]
    for start in (0, 200):
        rows += call("all_reduce", 4096, start + 20, kernel_us=40 - late_us)
        rows += call("all_gather", 2048, start + 60, dtype="bfloat16", kernel_us=20)
    return rows


def write_job(folder: Path) -> None:
    """Write the traces of a job of two ranks, of which the second is late."""
    folder.mkdir()
    for rank in (0, 1):
        written(folder / f"rank{rank}.json", trace(two_steps(late_us=rank * 15), rank))
