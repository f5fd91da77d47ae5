"""The recorder: the contract's columns and units, names of axes, wire bytes, no bit changed, and what it costs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench import workload
from harness.engines.threads.inproc import InprocEngine
from harness.ledger import COLUMNS, Call, Event
from harness.recording.recorder import Recorder
from parallel.subject import subject
from reference.case import Case

CONTRACT = """
case mode world_size rank step microbatch phase region op reduce_op axis group_size dtype shape payload_bytes
wire_bytes is_async call_index start_us duration_us caller
"""
AXES = {"tp": ((0, 1), (2, 3)), "dp": ((0, 2), (1, 3)), "pp": ((0,), (1,), (2,), (3,))}


def a_call(op: str = "all_reduce", *, group: tuple[int, ...] = (0, 1), desc: str = "", payload: int = 100) -> Call:
    return Call(
        op=op,
        reduce_op="sum",
        group=group,
        group_desc=desc,
        dtype="int8",
        shapes=((payload,),),
        payload_bytes=payload,
        is_async=False,
    )


def recorded(*calls: Call) -> list[Event]:
    """The events of these calls on rank 0."""
    with Recorder("seed=3", "tp", 4, AXES) as recorder, recorder.on_rank(0):
        for call in calls:
            recorder.completed(0, recorder.issued(0, call))
    return recorder.events()


def test_an_event_has_the_contracts_columns_in_the_contracts_order() -> None:
    assert tuple(CONTRACT.split()) == COLUMNS
    (event,) = recorded(a_call())
    told = [getattr(event, name) for name in COLUMNS]
    assert told[:4] == ["seed=3", "tp", 4, 0]
    assert told[8:18] == ["all_reduce", "sum", "tp", 2, "int8", "100", 100, 100, False, 0]


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize(
    ("op", "share"),
    [
        ("all_reduce", lambda p: Fraction(2 * (p - 1), p)),
        ("all_gather", lambda p: Fraction(p - 1, p)),
        ("reduce_scatter", lambda p: Fraction(p - 1, p)),
        ("all_to_all", lambda p: Fraction(p - 1, p)),
        ("broadcast", lambda p: Fraction(p > 1)),
        ("send", lambda p: Fraction(p > 1)),
    ],
)
def test_wire_bytes_follow_the_ring_model(op: str, share: Any, size: int) -> None:
    (event,) = recorded(a_call(op, group=tuple(range(size)), payload=24 * 7))
    assert event.wire_bytes == share(size) * 24 * 7


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


def test_bytes_are_those_of_the_view_and_not_of_its_storage() -> None:
    def program(rank: int) -> None:
        with recorder.on_rank(rank):
            bucket = torch.ones(1000, dtype=torch.float64)
            dist.all_reduce(bucket[10:20])
            dist.all_gather_into_tensor(bucket[:8], bucket[100:104])

    with InprocEngine() as engine, Recorder("", "tp", 2, {"tp": ((0, 1),)}) as recorder:
        engine.run(program, world_size=2, observer=recorder)
    assert [(e.rank, e.op, e.payload_bytes, e.wire_bytes) for e in recorder.events()] == [
        (rank, *event) for rank in range(2) for event in (("all_reduce", 80, 80), ("all_gather", 64, 32))
    ]


class Noisy(nn.Module):
    """A model with dropout: a recorder that drew one random number or changed one operation would show."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 8)

    def forward(self, x_BD: Tensor) -> Tensor:
        """[B, D] to [B, D], summed over ranks."""
        y_BD = self.down(self.drop(self.up(x_BD)))
        dist.all_reduce(y_BD)
        return y_BD  # type: ignore[no-any-return]


def noisy_run(rank: int, recorder: Recorder | None) -> list[Tensor]:
    """Losses, parameters and the random state after three steps."""

    def steps() -> list[Tensor]:
        model = Noisy()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        losses = []
        for _step in range(3):
            loss = model(torch.randn(4, 8)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return [*losses, *(p.detach() for p in model.parameters()), torch.get_rng_state()]

    if recorder is None:
        return steps()
    with recorder.on_rank(rank):
        return steps()


def test_recording_changes_no_bit_and_no_random_number() -> None:
    with InprocEngine() as engine:
        bare = engine.run(noisy_run, None, world_size=2, seed=7)
        with Recorder("", "tp", 2, {}) as recorder:
            recorded_ = engine.run(noisy_run, recorder, world_size=2, seed=7, observer=recorder)
    assert len(recorder.events()) == 6
    for one, other in zip(bare, recorded_, strict=True):
        assert len(one) == 8
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("text", ["mode=tp-sp recompute=full", "mode=isp tp=2 optimizer=adamw"])
def test_recording_changes_no_bit_of_a_whole_training(text: str) -> None:
    def program(rank: int, recorder: Recorder | None) -> Any:
        if recorder is None:
            return subject(case, torch.device("cpu"))
        with recorder.on_rank(rank):
            return subject(case, torch.device("cpu"))

    case = Case.parse(text)
    with InprocEngine() as engine:
        bare = engine.run(program, None, world_size=case.world_size)
        with Recorder(text, case.mode, case.world_size, case.axes) as recorder:
            seen = engine.run(program, recorder, world_size=case.world_size, observer=recorder)
    assert recorder.events()
    tensors = 0
    for one, other in zip(bare, seen, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            for mine, theirs in zip(locals_of(one[name]), locals_of(other[name]), strict=True):
                assert torch.equal(mine, theirs), name
                tensors += 1
    assert tensors > 50


def locals_of(value: Any) -> list[Tensor]:
    """The local tensors of an outcome's value."""
    if isinstance(value, Tensor):
        return [value]
    return [value.local] if hasattr(value, "local") else [part.local for part in value]


def seconds(run: Callable[[], None]) -> float:
    """Processor time of a run, seconds."""
    start_s = time.process_time()
    run()
    return time.process_time() - start_s


def test_recording_costs_little(capsys: pytest.CaptureFixture[str]) -> None:
    """Eight calls a rank in a small transformer: processor time of a recorded run between two that are not."""

    def program(rank: int, recorder: Recorder | None) -> None:
        if recorder is None:
            workload.rank_program(rank, 2, sizes, full, *inputs)
        else:
            with recorder.on_rank(rank):
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
    with InprocEngine() as engine:
        for _round in range(50):
            before_s, between_s, after_s = (seconds(run) for run in (off, on, off))
            ratios.append(2 * between_s / (before_s + after_s))
    ratio = statistics.median(ratios)
    with capsys.disabled():
        print(f"\nrecording on / off: {ratio:.3f} (median of 50, 16 calls)")
    assert {len(recorder.events()) for recorder in recorders} == {16}
    assert ratio < 1.5
