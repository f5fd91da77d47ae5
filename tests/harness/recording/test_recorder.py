"""The recorder: the contract's columns and units, wire bytes, no bit changed, and what it costs.

The axis of a group: by what the program called it, else by its ranks, and what is not certain of it.
"""

import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from fractions import Fraction

import pytest

from bench import workload
from shardproof.harness.engines.threads.inproc import InprocEngine
from shardproof.harness.ledger import COLUMNS, Call, Event
from shardproof.harness.protocols import Axes
from shardproof.harness.recording.naming import axis_name
from shardproof.harness.recording.recorder import Recorder
from tests.harness.recording.toy_calls import a_call

CONTRACT = """
case mode world_size rank step microbatch phase region op reduce_op axis group_size dtype shape payload_bytes
wire_bytes is_async call_index start_us duration_us caller graph
"""


def recorded_calls(*calls: Call) -> list[Event]:
    with Recorder("seed=3", "tp", 4, {"tp": ((0, 1), (2, 3))}) as recorder, recorder.on_rank(0):
        for call in calls:
            recorder.on_completion(0, recorder.on_issue(0, call))
    return recorder.events()


def test_an_event_has_the_contracts_columns_in_the_contracts_order() -> None:
    assert tuple(CONTRACT.split()) == COLUMNS
    (event,) = recorded_calls(a_call())
    told = [getattr(event, name) for name in COLUMNS]
    assert told[:4] == ["seed=3", "tp", 4, 0]
    assert told[8:18] == ["all_reduce", "sum", "tp", 2, "float32", "2x4", 32, 32, False, 0]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_wire_bytes_follow_the_ring_model(size: int) -> None:
    part = Fraction(size - 1, size)
    shares = {"all_reduce": 2 * part, "all_gather": part, "reduce_scatter": part, "all_to_all": part}
    shares |= dict.fromkeys(("broadcast", "send"), Fraction(size > 1))
    events = recorded_calls(*(a_call(op, group=tuple(range(size)), payload_bytes=24 * 7) for op in shares))
    assert {event.op: event.wire_bytes for event in events} == {op: share * 24 * 7 for op, share in shares.items()}


def test_times_are_microseconds_since_the_recorder_was_entered() -> None:
    recorder = Recorder("", "tp", 1, {})
    time.sleep(0.02)  # before the run: does not count
    with recorder, recorder.on_rank(0):
        first = recorder.on_issue(0, a_call())
        time.sleep(0.01)
        second = recorder.on_issue(0, a_call())
        recorder.on_completion(0, second)
        recorder.on_completion(0, first)
        recorder.on_issue(0, a_call())
    long, short, never = recorder.events()
    assert 0 <= long.start_us < 10_000
    assert long.start_us + 10_000 <= short.start_us
    assert long.duration_us >= 10_000 > short.duration_us > 0
    assert never.duration_us == 0
    assert [event.call_index for event in (long, short, never)] == [0, 1, 2]


def seconds(run: Callable[[], None]) -> float:
    start_s = time.process_time()
    run()
    return time.process_time() - start_s


def test_recording_costs_little(capsys: pytest.CaptureFixture[str], engine: InprocEngine) -> None:
    """Eight calls a rank in a small transformer: processor time of a recorded run between two that are not."""

    def program(rank: int, recorder: Recorder | None) -> None:
        with nullcontext() if recorder is None else recorder.on_rank(rank):
            workload.rank_program(rank, 2, sizes, full, *inputs)

    def off() -> None:
        engine.run(program, None, world_size=2)

    def on() -> None:
        with Recorder("", "tp", 2, {"tp": ((0, 1),)}) as recorder:
            engine.run(program, recorder, world_size=2, observer=recorder)
        recorders.append(recorder)

    sizes = workload.Sizes()
    full, inputs = workload.weights(sizes), workload.data(sizes)
    recorders: list[Recorder] = []
    ratios = []
    for _round in range(9):
        before_s, between_s, after_s = (seconds(run) for run in (off, on, off))
        ratios.append(2 * between_s / (before_s + after_s))
    ratio = statistics.median(ratios)
    with capsys.disabled():
        print(f"\nrecording on / off: {ratio:.3f} (median of 9, 16 calls)")
    assert {len(recorder.events()) for recorder in recorders} == {16}
    assert ratio < 1.5


AXES = {"tp": ((0, 1), (2, 3)), "dp": ((0, 2), (1, 3)), "pp": ((0,), (1,), (2,), (3,))}


EXPERTS = {
    "tp": ((0, 1), (2, 3), (4, 5), (6, 7)),
    "cp": tuple((rank,) for rank in range(8)),
    "dp": ((0, 2), (1, 3), (4, 6), (5, 7)),
    "pp": ((0, 4), (1, 5), (2, 6), (3, 7)),
    "etp": tuple((rank,) for rank in range(8)),
    "ep": ((0, 1), (2, 3), (4, 5), (6, 7)),
    "edp": ((0, 2), (1, 3), (4, 6), (5, 7)),
}
"""tp=2 dp=2 pp=2 ep=2 etp=1: groups of Megatron-Core and meshes of torchtitan, worked out by hand."""


KNOWN = [
    ((0, 2), "mesh_dp", "dp"),
    ((0, 1, 2, 3), "default_pg", "world"),
    ((0, 3), "undefined", "0,3"),
    ((2,), "undefined", "2"),
    ((2,), "pp", "pp"),
    ((0, 1), "TENSOR_MODEL_PARALLEL_GROUP", "tp"),
    ((0, 2), "TENSOR_MODEL_PARALLEL_GROUP", "tp"),  # the check of groups compares the ranks
    ((0, 1), "EXPERT_MODEL_PARALLEL_GROUP", "ep"),
    ((0, 1), "experts", "ep"),
    ((0, 2), "EXPERT_DATA_PARALLEL_GROUP_GLOO", "edp"),
    ((0, 2), "DATA_PARALLEL_GROUP_WITH_CP", "dp"),
    ((0, 1), "DATA_PARALLEL_GROUP_WITH_CP", "dp_cp"),
    ((0, 1), "mesh_dp_shard", "dp_shard"),
    ((0, 2), "mesh_dp_shard", "dp"),
    ((0, 1, 2, 3), "MODEL_PARALLEL_GROUP", "tp_pp"),
    ((0, 1), "PIPELINE_MODEL_PARALLEL_GROUP", "pp"),
    ((0, 3), "EMBEDDING_GROUP", "embedding"),
    ((0, 3), "mesh_stages", "stages"),
]
SPLIT = [
    ((0, 1, 4, 5), "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP_WITH_EGTP", "ep_pp"),
    ((2, 3), "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP", "ep"),
    ((2,), "EXPERT_TENSOR_PARALLEL_GROUP", "etp"),
    ((1, 3), "EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT", "edp"),
    ((0, 1), "TENSOR_AND_CONTEXT_PARALLEL_GROUP", "tp"),
    ((1, 3), "DATA_PARALLEL_GROUP_WITH_CP_AG", "dp"),
    ((1,), "INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP", "intra_dp_cp"),
    (tuple(range(8)), "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP", "tp_dp_pp"),
    ((0, 2), "mesh_batch", "dp"),
    ((0, 2), "mesh_loss_mesh", "dp"),
    ((0, 2), "mesh_dp_shard_cp", "dp"),
    ((0, 2), "mesh_efsdp", "edp"),
    ((0, 3), "mesh_batch", "dp"),  # other ranks than the axis has: the check of groups tells
    ((0, 3), "DATA_LOADER_QUEUE", "dp_loader_queue"),
    ((0, 3), "data_loader", "data_loader"),
]
WITHOUT_A_CASE = [
    ("EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP_WITH_EGTP", "etp_ep_pp_egtp"),
    ("TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP", "tp_dp_cp"),
    ("mesh_loss_mesh", "dp_cp"),
    ("mesh_fsdp", "dp_shard_cp"),
]


@pytest.mark.parametrize(
    ("axes", "group", "desc", "name"),
    [
        *((AXES, *row) for row in KNOWN),
        *((EXPERTS, *row) for row in SPLIT),
        *(({}, (0, 3), *row) for row in WITHOUT_A_CASE),
    ],
)
def test_a_description_names_a_group_else_its_ranks_do(
    axes: Axes, group: tuple[int, ...], desc: str, name: str
) -> None:
    assert axis_name(group, desc, axes, 4 if axes is AXES else 8) == (name, "")


@pytest.mark.parametrize(
    ("group", "desc", "why"),
    [((3, 1), "undefined", "which has no description"), ((0, 2), "mesh_lanes", "is described as 'mesh_lanes'")],
)
def test_an_axis_that_the_ranks_alone_name_is_a_doubt(group: tuple[int, ...], desc: str, why: str) -> None:
    name, doubt = axis_name(group, desc, AXES, 4)
    assert name == "dp"
    assert doubt.startswith("axis dp is named by ") and why in doubt


def test_a_rank_list_that_two_axes_share_names_none_and_all_ranks_of_one_axis_name_it() -> None:
    assert axis_name((0, 1), "default_pg", {"dp": ((0, 1),), "tp": ((0,), (1,))}, 2) == ("dp", "")
    assert axis_name((0, 1), "undefined", {"dp": ((0, 1),)}, 2)[1] != ""
    shared = {"tp": ((0, 1),), "wp": ((0, 1),)}
    assert axis_name((0, 1), "default_pg", shared, 2) == ("world", "")
    assert axis_name((0, 1), "wp", shared, 2) == axis_name((0, 1), "mesh_wp", shared, 2) == ("wp", "")
    assert axis_name((0, 1), "", shared, 4) == ("0,1", "")
