"""Ledgers of pipelines: every message between stages has phase pipeline, its step and the micro-batch that it is of."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from shardproof.harness.ledger import Event
from shardproof.harness.torch_internals.cuda_on_cpu import cuda_on_cpu
from tests.harness.programs.scripts import megatron_1f1b
from tests.harness.recording.test_manual_updates import gradient, in_data
from tests.harness.recording.toy_calls import Part, recorded

STEPS, MICRO, WIDTH = 2, 5, 4
CALLS = {"send": dist.isend, "recv": dist.irecv}
Message = tuple[str, int, int]
"""Op, step, micro-batch."""


class Stage:
    """Stage of one forward, one backward, written after the paper (Narayanan et al. 2021). `said` is what it did."""

    def __init__(self, rank: int, stages: int, group: dist.ProcessGroup | None) -> None:
        self.rank, self.stages, self.group = rank, stages, group
        torch.manual_seed(rank)
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.said: list[Message] = []
        self.works: list[dist.Work] = []
        self.step = 0

    def message(self, op: str, stage: int, tensor: Tensor, micro: int) -> None:
        if 0 <= stage < self.stages:
            self.said.append((op, self.step, micro))
            self.works += dist.batch_isend_irecv([dist.P2POp(CALLS[op], tensor, stage, self.group)])
            if op == "recv":
                self.wait()

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.works.clear()

    def run(self, update: Callable[[list[nn.Parameter]], object]) -> None:
        inputs = [torch.ones(2, WIDTH, requires_grad=True) for _ in range(MICRO)]
        gradients = [torch.ones(2, WIDTH) for _ in range(MICRO)]
        outputs: list[Tensor] = []
        first = min(self.stages - self.rank - 1, MICRO)

        def forward(micro: int) -> None:
            self.message("recv", self.rank - 1, inputs[micro].data, micro)
            outputs.append(self.model(inputs[micro]))
            self.message("send", self.rank + 1, outputs[micro].detach(), micro)

        def backward(micro: int) -> None:
            self.message("recv", self.rank + 1, gradients[micro], micro)
            outputs[micro].backward(gradients[micro])
            self.message("send", self.rank - 1, gradient(inputs[micro]), micro)

        for micro in range(MICRO + first):
            if micro < MICRO:
                forward(micro)
            if micro >= first:
                backward(micro - first)
        self.wait()
        update(list(self.model.parameters()))
        self.model.zero_grad()
        self.step += 1


def ran(program: Callable[[int], object], world_size: int, **axes: tuple[tuple[int, ...], ...]) -> list[list[Event]]:
    """The events of every rank; no axis by default."""
    events = recorded(program, world_size, axes)
    return [[event for event in events if event.rank == rank] for rank in range(world_size)]


def messages(events: list[Event]) -> list[Message]:
    assert {event.phase for event in events if event.op in ("send", "recv")} == {"pipeline"}
    return [(event.op, event.step, event.microbatch) for event in events if event.phase == "pipeline"]


@pytest.mark.parametrize(
    ("stages", "described", "axes", "name"),
    [
        (2, "", {"tp": ((0, 1),)}, "world"),
        (4, "PIPELINE_MODEL_PARALLEL_GROUP", {"tp": ((0, 1, 2, 3),)}, "pp"),
        (2, "", {"pp": ((0, 1),), "tp": ((0,), (1,))}, "pp"),  # a case with stages
    ],
)
def test_1f1b_by_hand(stages: int, described: str, axes: dict[str, Any], name: str) -> None:
    said: dict[int, list[Message]] = {}

    def program(rank: int) -> None:
        group = dist.new_group(list(range(stages)), group_desc=described) if described else None
        stage = Stage(rank, stages, group)
        said[rank] = stage.said
        for _step in range(STEPS):
            stage.run(in_data)

    by_rank = ran(program, stages, **axes)
    assert [messages(events) for events in by_rank] == [said[rank] for rank in range(stages)]
    assert {event.axis for events in by_rank for event in events} == {name}
    assert not [event.doubts for events in by_rank for event in events if event.doubts]


def test_what_else_a_stage_sends_keeps_its_phase() -> None:
    """A ring of context parallel ranks inside of a module, and tied gradients after the last backward."""

    def program(rank: int) -> None:
        alone = dist.new_group([rank], use_local_synchronization=True, group_desc="cp")
        stage = Stage(rank, 2, None)

        def ring(_: object, x: Tensor) -> Tensor:
            sent = dist.isend(x.detach(), rank, group=alone)
            received = dist.irecv(torch.empty_like(x), rank, group=alone)
            for work in (sent, received):
                assert work is not None
                work.wait()
            return x

        stage.model = nn.Sequential(Part(ring), stage.model)

        def update(parameters: list[nn.Parameter]) -> None:
            dist.all_reduce(gradient(parameters[0]))
            in_data(parameters)

        for _step in range(STEPS):
            stage.run(update)

    for events in ran(program, 2):
        inside = [(e.op, e.phase, e.step, e.microbatch) for e in events if e.axis == "cp"]
        steps = [(step, micro) for step in range(STEPS) for micro in range(MICRO)]
        assert inside == [(op, "forward", step, micro) for step, micro in steps for op in ("send", "recv")]
        assert [(e.phase, e.step) for e in events if e.op == "all_reduce"] == [("grad_sync", s) for s in range(STEPS)]


def test_data_between_a_send_and_the_next_forward_is_data() -> None:
    def program(rank: int) -> None:
        model = nn.Linear(WIDTH, WIDTH)
        for _micro in range(2):
            x = torch.ones(2, WIDTH)
            dist.broadcast(x, 0)
            if rank == 0:
                dist.send(model(x).detach(), 1)
            else:
                dist.recv(x, 0)
                model(x)

    sender, receiver = ran(program, 2)
    assert [(e.op, e.phase, e.microbatch) for e in sender] == [
        ("broadcast", "data", 0),
        ("send", "pipeline", 0),
        ("broadcast", "data", 1),
        ("send", "pipeline", 1),
    ]
    assert [(e.phase, e.microbatch) for e in receiver if e.op == "recv"] == [("pipeline", 0), ("pipeline", 1)]


def turns_of_two_stages(micro: int) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Messages (op, micro-batch) of the first and the last of two stages, one forward and one backward in turn."""
    ahead = [("send", 0), *[(op, m + (op == "send")) for m in range(micro) for op in ("send", "recv")]]
    return [turn for turn in ahead if turn[1] < micro], [(op, m) for m in range(micro) for op in ("recv", "send")]


def test_torchs_schedule_1f1b() -> None:
    """The schedule's first step also sends shapes, and may run the module once more for them."""
    more: dict[int, int] = {}

    def program(rank: int) -> None:
        model, calls = nn.Linear(WIDTH, WIDTH), list[int]()
        model.register_forward_hook(lambda *_: calls.append(1))
        stage = PipelineStage(model, rank, 2, torch.device("cpu"))
        schedule = Schedule1F1B(stage, MICRO, loss_fn=lambda out, goal: (out - goal).square().mean())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(STEPS):
            calls.clear()
            schedule.step(*((torch.ones(MICRO, WIDTH),) if rank == 0 else ()), target=torch.zeros(MICRO, WIDTH))
            more[step] = len(calls) - MICRO
            for p in model.parameters():
                dist.all_reduce(gradient(p))
            optimizer.step()
            optimizer.zero_grad()

    for events, expected in zip(ran(program, 2), turns_of_two_stages(MICRO), strict=True):
        sent = [event for event in events if event.op in ("send", "recv")]
        tensors = [event for event in sent if event.shape == f"1x{WIDTH}"]
        assert {event.phase for event in sent} == {"pipeline"}
        assert {event.step for event in sent if event not in tensors} == {0}
        for step in range(STEPS):
            mine = [(e.op, e.microbatch - more[step]) for e in tensors if e.step == step]
            assert mine == expected
        assert [(e.phase, e.step) for e in events if e.op == "all_reduce"] == [
            ("grad_sync", step) for step in range(STEPS) for _ in range(2)
        ]


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")  # Megatron's own
def test_megatrons_1f1b_and_its_distributed_optimizer() -> None:
    """Two stages, two data ranks."""
    pytest.importorskip("megatron.core", reason="needs the extra `peers`")
    alone = ((0,), (1,), (2,), (3,))
    axes = {"tp": alone, "cp": alone, "dp": ((0, 1), (2, 3)), "pp": ((0, 2), (1, 3))}
    state = ("megatron.core.parallel_state", "megatron.core.tensor_parallel.random")
    with cuda_on_cpu():
        events = recorded(lambda _rank: megatron_1f1b.train(), 4, axes, per_rank=state)
    assert not [event.doubts for event in events if event.doubts]
    update = [
        ("reduce_scatter", "grad_sync", "dp"),
        ("all_reduce", "grad_sync", "embedding"),
        ("all_reduce", "grad_sync", "dp_pp"),  # the norm, over all ranks of an optimizer
        ("all_gather", "step", "dp"),
    ]
    turns = turns_of_two_stages(megatron_1f1b.MICRO)
    for rank in range(4):
        last = rank >= 2
        # Before its first forward it compares what the optimizer of each rank is.
        mine = [e for e in events if e.rank == rank and e.phase != "data"]
        for step in range(megatron_1f1b.STEPS):
            of_step = [e for e in mine if e.step == step]
            hops = [e for e in of_step if e.phase == "pipeline"]
            assert [(e.op, e.microbatch) for e in hops] == turns[last]
            assert {e.axis for e in hops} == {"pp"}
            rest = [(e.op, e.phase, e.axis) for e in of_step if e.phase not in ("pipeline", "forward")]
            assert rest == [*update, *([("all_reduce", "metric", "dp")] if last else [])]
            assert {e.axis for e in of_step if e.phase == "forward"} <= {"tp"}
