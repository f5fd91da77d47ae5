"""Traces of other people's jobs, counted by hand. They are data beside the repository: SHARDPROOF_TRACES names them."""

import os
from collections import Counter
from pathlib import Path

import pytest

from shardproof.harness.traces.kineto import read_kineto

FOLDER = os.environ.get("SHARDPROOF_TRACES", "")
NANOGPT = {
    ("all_gather", 8, "bfloat16"): (18, 772_679_424),
    ("all_gather", 8, "float32"): (10, 1_207_960_064),
    ("reduce_scatter", 8, "bfloat16"): (18, 772_679_424),
    ("reduce_scatter", 8, "float32"): (10, 1_207_960_064),
}
ALEXNET = {
    ("all_reduce", 2, "float32"): (15, 306_684_384),
    ("broadcast", 2, "float32"): (3, 637_440),
    ("broadcast", 2, "int64"): (3, 1_272),
}
COUNTED = {
    "hta_alexnet_ddp_rank0": (0, 2, ALEXNET, [7, 7, 7]),
    "modded_nanogpt_rank0": (0, 8, NANOGPT, [8, 20, 8, 20]),
    "modded_nanogpt_rank1": (1, 8, NANOGPT, [8, 20, 8, 20]),
}


def of(name: str) -> Path:
    path = Path(FOLDER) / f"{name}.json.gz"
    if not FOLDER or not path.is_file():
        pytest.skip(f"{name}.json.gz is not here: SHARDPROOF_TRACES is the folder of public traces")
    return path


@pytest.mark.parametrize("name", COUNTED)
def test_calls_and_bytes_are_as_counted_by_hand(name: str) -> None:
    rank, world_size, counted, by_step = COUNTED[name]
    read = read_kineto(of(name))
    calls: Counter[tuple[str, int | None, str]] = Counter()
    sizes: Counter[tuple[str, int | None, str]] = Counter()
    for call in read.calls:
        calls[call.op, call.group_size, call.dtype] += 1
        sizes[call.op, call.group_size, call.dtype] += call.payload_bytes or 0
    assert {kind: (calls[kind], sizes[kind]) for kind in calls} == counted
    assert (read.rank, read.world_size) == (rank, world_size)
    steps = Counter(call.step for call in read.calls)
    assert [steps[step.number] for step in read.steps] == by_step
    assert all(call.device_us is not None and call.group == tuple(range(world_size)) for call in read.calls)


def test_buckets_of_ddp_are_backward_and_buffers_forward() -> None:
    phases = {(call.op, call.phase) for call in read_kineto(of("hta_alexnet_ddp_rank0")).calls}
    assert phases == {("all_reduce", "backward"), ("broadcast", "forward")}
