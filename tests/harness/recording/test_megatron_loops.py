"""The ledger of unmodified Megatron-Core: its 1F1B schedule with tied embeddings and the distributed optimizer."""

from __future__ import annotations

import pytest

from harness.torch_internals.cuda_on_cpu import cuda_on_cpu
from tests.harness.programs.scripts.megatron_1f1b import MICRO, STEPS, train
from tests.harness.recording.toy_calls import recorded

STATE = ("megatron.core.parallel_state", "megatron.core.tensor_parallel.random")


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")  # Megatron's own
def test_the_1f1b_schedule_and_the_distributed_optimizer() -> None:
    """Two stages, two data ranks."""
    pytest.importorskip("megatron.core", reason="needs the extra `peers`")
    alone = ((0,), (1,), (2,), (3,))
    axes = {"tp": alone, "cp": alone, "dp": ((0, 1), (2, 3)), "pp": ((0, 2), (1, 3))}
    with cuda_on_cpu():
        events = recorded(lambda _rank: train(), 4, axes, per_rank=STATE)
    assert not [event.doubts for event in events if event.doubts]
    update = [
        ("reduce_scatter", "grad_sync", "dp"),
        ("all_reduce", "grad_sync", "embedding"),
        ("all_reduce", "grad_sync", "dp_pp"),  # the norm, over all ranks of an optimizer
        ("all_gather", "step", "dp"),
    ]
    turns = [("send", 0), *[(op, m + (op == "send")) for m in range(MICRO) for op in ("send", "recv")]]
    messages = {
        False: [turn for turn in turns if turn[1] < MICRO],
        True: [(op, m) for m in range(MICRO) for op in ("recv", "send")],
    }
    for rank in range(4):
        last = rank >= 2
        # Before its first forward it compares what the optimizer of each rank is.
        mine = [e for e in events if e.rank == rank and e.phase != "data"]
        for step in range(STEPS):
            of_step = [e for e in mine if e.step == step]
            hops = [e for e in of_step if e.phase == "pipeline"]
            assert [(e.op, e.microbatch) for e in hops] == messages[last]
            assert {e.axis for e in hops} == {"pp"}
            rest = [(e.op, e.phase, e.axis) for e in of_step if e.phase not in ("pipeline", "forward")]
            assert rest == [*update, *([("all_reduce", "metric", "dp")] if last else [])]
            assert {e.axis for e in of_step if e.phase == "forward"} <= {"tp"}
