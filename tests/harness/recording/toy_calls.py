"""A program that pretends to communicate: it reports calls to the recorder without any group, at known places.

Calls are reported by an autograd Function, as tensor-parallel code has them (`Speak`), or directly (`Voice.say`).
Tensors are [2, 4] float32; every call's payload is 32 bytes. A CUDA graph is played on the CPU (`SimulatedGraph`): it
has the methods of torch.cuda.CUDAGraph, and a replay runs a function.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardproof.harness.engines.engine import Engine
from shardproof.harness.engines.threads.inproc import InprocEngine
from shardproof.harness.ledger import Call, Event, Observer
from shardproof.harness.protocols import Axes
from shardproof.harness.recording.recorder import Recorder

Told = tuple[int, int, str, str]
"""Step, micro-batch, phase, region."""
LEAVES = ("layers.0.a", "layers.0.b", "layers.1.a", "layers.1.b")
"""The modules of `Model` that speak, in the order of its forward."""


def a_call(op: str = "all_reduce", **words: Any) -> Call:
    """A call of 32 bytes in a group of ranks 0 and 1, with other words if there are any."""
    plain: dict[str, Any] = {"reduce_op": "sum", "group": (0, 1), "group_desc": "tp", "dtype": "float32"}
    return Call(op=op, **plain | {"shapes": ((2, 4),), "payload_bytes": 32, "is_async": False} | words)


def an_event(**words: Any) -> Event:
    """An event with these words, and nothing in every other field."""
    return Event(**dict.fromkeys(Event.__slots__, "") | words)


class Voice:
    """A rank's way to report a call."""

    def __init__(self, observer: Observer, rank: int = 0) -> None:
        self.observer = observer
        self.rank = rank

    def say(self, op: str = "all_reduce", *, is_async: bool = False) -> None:
        self.observer.on_completion(self.rank, self.observer.on_issue(self.rank, a_call(op, is_async=is_async)))


class Speak(torch.autograd.Function):
    """Identity that reports an all-reduce in forward and an all-gather in backward."""

    @staticmethod
    def forward(ctx: Any, x_BD: Tensor, voice: Voice) -> Tensor:
        ctx.voice = voice
        voice.say("all_reduce")
        return x_BD.view_as(x_BD)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.voice.say("all_gather")
        return gradients[0], None


class Linear(nn.Module):
    def __init__(self, voice: Voice) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))
        self.voice = voice

    def forward(self, x_BD: Tensor) -> Tensor:
        spoken: Tensor = Speak.apply(x_BD @ self.weight, self.voice)
        return spoken


Around = Callable[[nn.Module, Tensor], Any]
"""A way to call a module."""


def checkpointed(reentrant: bool | None) -> Around:
    """Calls by checkpointing of one of its flavours; as they are for None."""

    def around(module: nn.Module, x_BD: Tensor) -> Any:
        return module(x_BD) if reentrant is None else checkpoint(module, x_BD, use_reentrant=reentrant)

    return around


PLAIN = checkpointed(None)


class Block(nn.Module):
    """Two linears around a relu; `around` calls each of them."""

    def __init__(self, voice: Voice, around: Around = PLAIN) -> None:
        super().__init__()
        self.a, self.b = Linear(voice), Linear(voice)
        self.around = around

    def forward(self, x_BD: Tensor) -> Any:
        return self.around(self.b, torch.relu(self.around(self.a, x_BD)))


class Model(nn.Module):
    """Two blocks, `layers.0` and `layers.1`."""

    def __init__(self, voice: Voice, around: Around = PLAIN, inside: Around = PLAIN) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(voice, inside), Block(voice, inside)])
        self.around = around

    def forward(self, x_BD: Tensor) -> Tensor:
        for layer in self.layers:
            x_BD = self.around(layer, x_BD)
        return x_BD


class Part(nn.Module):
    """Modules and parameters by name, and a forward that is a function of the module and its input."""

    def __init__(self, compute: Callable[[Any, Tensor], Any], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.compute = compute

    def forward(self, x_BD: Tensor) -> Any:
        return self.compute(self, x_BD)


def input_BD() -> Tensor:
    """A positive input that wants a gradient, so that every layer has a backward."""
    return torch.ones(2, 4, requires_grad=True)


def record(program: Callable[[Voice], object]) -> list[Event]:
    """The events of one rank that runs `program(voice)` under a recorder."""
    with Recorder("seed=0", "tp", 2, {"tp": ((0, 1),)}) as recorder, recorder.on_rank(0):
        program(Voice(recorder))
    return recorder.events()


def recorded(
    program: Callable[[int], object],
    world_size: int = 2,
    axes: Axes | None = None,
    *,
    per_rank: Sequence[str] = (),
    engine: Engine | None = None,
) -> list[Event]:
    """The events of all ranks, which run `program(rank)`, in an in-process engine by default; the axis is dp then."""

    def on_rank(rank: int) -> None:
        with recorder.on_rank(rank):
            program(rank)

    axes = {"dp": (tuple(range(world_size)),)} if axes is None else axes
    with engine or InprocEngine() as made, Recorder("seed=0", "tp", world_size, axes) as recorder:
        made.run(on_rank, world_size=world_size, observer=recorder, per_rank=per_rank)
    return recorder.events()


def told(events: list[Event]) -> list[Told]:
    return [(e.step, e.microbatch, e.phase, e.region) for e in events]


def sites(program: Callable[[Voice], object]) -> list[Told]:
    """Where the calls of one rank are that runs `program(voice)`."""
    return told(record(program))


def forward(step: int = 0, microbatch: int = 0) -> list[Told]:
    """Calls of a forward of `Model`."""
    return [(step, microbatch, "forward", leaf) for leaf in LEAVES]


def backward(step: int = 0, microbatch: int = 0) -> list[Told]:
    """Calls of its backward, for an input that wants a gradient."""
    return [(step, microbatch, "backward", leaf) for leaf in reversed(LEAVES)]


class SimulatedGraph:
    """Every replay runs the captured function again; on a GPU the kernels would run, without Python."""

    def __init__(self, run: Callable[[], object]) -> None:
        self.run = run

    def capture(self) -> None:
        """Capture the function, as torch.cuda.graph does; here it is computed too."""
        self.capture_begin()
        self.run()
        self.capture_end()

    def capture_begin(self) -> None:
        """As torch.cuda.CUDAGraph has it."""

    def capture_end(self) -> None:
        """As torch.cuda.CUDAGraph has it."""

    def replay(self) -> None:
        self.run()
