"""Traces of other people's jobs, counted by hand. They are data beside the repository: SHARDPROOF_TRACES names them."""

import os
from collections import Counter
from pathlib import Path

import pytest

from shardproof.harness.traces.calls import Trace
from shardproof.harness.traces.kineto import NO_CALLS, read_kineto

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

# Counted by a script that knows the three rows of a call and nothing of the reader, in repositories that it was not
# tuned to: facebookresearch/param (et_replay/tests/inputs/dlrm_kineto.tar.gz, worker 0; torch 1.13 has no groups),
# KellerJordan/modded-nanogpt (2025-10-31_AdamSyncGradientHook, hook), HolisticTraceAnalysis (tests/data/
# ns_resolution_trace) and deepseek-ai/profile-data (train.json, whose ranks talk by DeepEP alone).
DLRM = {
    ("all_reduce", None, "float32"): (3, 2_485_252),
    ("all_to_all", None, "float32"): (2, 49_152),
    ("all_to_all", None, "int32"): (2, 15_104),
    ("all_to_all", None, "int64"): (1, 192),
}
ONE_RANK = {
    ("all_reduce", 1, "float32"): (25, 511_140_640),
    ("broadcast", 1, "float32"): (5, 1_062_400),
    ("broadcast", 1, "int64"): (5, 2_120),
}
MORE: dict[str, tuple[int, int, object, list[int], int]] = {
    "param_dlrm_rank0": (0, 8, DLRM, [8], 0),
    "modded_nanogpt_hook_rank0": (0, 8, NANOGPT, [8, 20, 8, 20], 20),
    "hta_ns_resolution_rank0": (0, 1, ONE_RANK, [7] * 5, 0),
    "deepseek_train_rank0": (0, 64, {}, [0], 0),
}


def of(name: str) -> Path:
    path = Path(FOLDER) / f"{name}.json.gz"
    if not FOLDER or not path.is_file():
        pytest.skip(f"{name}.json.gz is not here: SHARDPROOF_TRACES is the folder of public traces")
    return path


@pytest.mark.parametrize("name", COUNTED)
def test_calls_and_bytes_are_as_counted_by_hand(name: str) -> None:
    _, world_size, *_ = COUNTED[name]
    read = as_counted(name, *COUNTED[name])
    assert all(call.device_us is not None and call.group == tuple(range(world_size)) for call in read.calls)


@pytest.mark.parametrize("name", MORE)
def test_traces_that_nobody_tuned_to_are_as_counted(name: str) -> None:
    rank, world_size, counted, by_step, early = MORE[name]
    read = as_counted(name, rank, world_size, counted, by_step)
    assert read.lost == (f"{early} kernels of calls that were issued before the trace began" if early else "")
    assert read.notes == (() if read.calls else (NO_CALLS,))


def as_counted(name: str, rank: int, world_size: int, counted: object, by_step: list[int]) -> Trace:
    """The trace, whose calls, bytes, dtypes and sizes of groups are those counted."""
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
    return read


def test_buckets_of_ddp_are_backward_and_buffers_forward() -> None:
    phases = {(call.op, call.phase) for call in read_kineto(of("hta_alexnet_ddp_rank0")).calls}
    assert phases == {("all_reduce", "backward"), ("broadcast", "forward")}
