"""The recorder: the contract's columns and units, names of axes, wire bytes, no bit changed, and what it costs."""

import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench import workload
from harness.engines.threads.inproc import InprocEngine
from harness.ledger import COLUMNS, Call, Event
from harness.outcome.blocks import localize
from harness.recording.recorder import Recorder
from harness.witnesses.measured import digest
from tests.harness.recording.toy_calls import Part, a_call

CONTRACT = """
case mode world_size rank step microbatch phase region op reduce_op axis group_size dtype shape payload_bytes
wire_bytes is_async call_index start_us duration_us caller graph
"""


def recorded_calls(*calls: Call) -> list[Event]:
    """The events of these calls on rank 0."""
    with Recorder("seed=3", "tp", 4, {"tp": ((0, 1), (2, 3))}) as recorder, recorder.on_rank(0):
        for call in calls:
            recorder.completed(0, recorder.issued(0, call))
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
        first = recorder.issued(0, a_call())
        time.sleep(0.01)
        second = recorder.issued(0, a_call())
        recorder.completed(0, second)
        recorder.completed(0, first)
        recorder.issued(0, a_call())
    long, short, never = recorder.events()
    assert 0 <= long.start_us < 10_000
    assert long.start_us + 10_000 <= short.start_us
    assert long.duration_us >= 10_000 > short.duration_us > 0
    assert never.duration_us == 0
    assert [event.call_index for event in (long, short, never)] == [0, 1, 2]


def summed(_: object, x: Tensor) -> Tensor:
    """The sum over the ranks, in place."""
    dist.all_reduce(x)
    return x


def noisy() -> dict[str, Tensor]:
    """Losses, parameters and the random state after three steps of a model with dropout.

    A recorder that drew one random number or changed one operation would show.
    """
    model, losses = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 8), Part(summed)), {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses[f"loss/{step}"] = loss.detach()
    return losses | {name: p.detach() for name, p in model.named_parameters()} | {"random": torch.get_rng_state()}


def test_recording_changes_no_bit_and_no_random_number(engine: InprocEngine) -> None:
    """In every proof the check `recording` compares the outcomes; here is the random state, too."""

    def program(rank: int, recorder: Recorder | None) -> Any:
        with nullcontext() if recorder is None else recorder.on_rank(rank):
            return localize(noisy())

    bare = engine.run(program, None, world_size=2, seed=7)
    with Recorder("", "tp", 2, {"tp": ((0, 1),)}) as recorder:
        seen = engine.run(program, recorder, world_size=2, seed=7, observer=recorder)
    assert recorder.events()
    for one, other in zip(bare, seen, strict=True):
        assert one.keys() == other.keys() and len(one) == 8
        assert digest(one) == digest(other)


def seconds(run: Callable[[], None]) -> float:
    """Processor time of a run, seconds."""
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
