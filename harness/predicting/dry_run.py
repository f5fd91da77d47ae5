"""A dry run: a subject on tensors that have shapes and no numbers, on a few ranks that stand for all of a world.

Ranks of one place on the mesh are expected to do the same, so one rank of each place is run. A place is, along every
axis of more than one rank, the first, the last or a middle one: there programs treat ranks differently. The meter
measures what such a rank computes between its calls, and the memory that it needs:

    meter = Meter()
    with Interposer(meter), ...:          # the meter observes calls, so that it knows which work belongs to which
        with meter.on_rank(rank): program(rank)
    meter.stretches, meter.peak_bytes

The meter is a dispatch mode for tensors of the meta device, entered in the thread of one rank. FLOPs are those of
matrix products and attention (two a multiply-add, masked pairs counted too) by torch.utils.flop_counter's
formulas. Live bytes are those of storages, each once, from its first to its last use; storages that are resized keep
their first size. A subject that leaves the device aside holds its tensors on the CPU: then those are counted. Units:
FLOPs, bytes.

As on a device, attention takes its fused kernel (harness.torch_internals.backends). Functional collectives, whose
meta kernels only make shapes, are sent to their group.
"""

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils import flop_counter

from shardproof.harness.engines.calls.callers import waits_when_read
from shardproof.harness.engines.engine import RunRequest
from shardproof.harness.engines.threads.dry import DryEngine
from shardproof.harness.errors import NotComputed
from shardproof.harness.ledger import Call, Event
from shardproof.harness.predicting.known_shapes import make_result
from shardproof.harness.protocols import CaseLike, Subject
from shardproof.harness.recording.measures import SavedActivations
from shardproof.harness.recording.recorder import Recorder
from shardproof.harness.subject import call_subject, kept_per_rank, named_axes, session
from shardproof.harness.torch_internals.autograd import current_task, storage_id
from shardproof.harness.torch_internals.backends import fused_attention, waits_of_fakes
from shardproof.harness.torch_internals.dispatch import (
    FUSED,
    FUSED_BACKWARD,
    DispatchMode,
    dispatch_keys,
    end_functional,
    has_kernel,
    packet_of,
    short_name,
    take_themselves_apart,
)

START, WAIT, END = "start", "wait", "end"
TO_BACKWARD, TO_FORWARD = "to backward", "to forward"


class Stretch(NamedTuple):
    """A stretch of computing, and the call at its end: `ticket` was issued there, or waited for.

    If there is no call (-1), the program ended there, or autograd's backward began or ended. `peak_bytes` is the most
    that tensors held at once during the stretch, `held_bytes` what they hold at its end.
    """

    flops: int
    then: str
    ticket: int = -1
    peak_bytes: int = 0
    held_bytes: int = 0


def find_hidden_calls(stretches: Sequence[Stretch]) -> set[int]:
    """The tickets of calls between whose start and wait a product was computed."""
    flops, before, found = 0, dict[int, int](), set[int]()
    for stretch in stretches:
        flops += stretch.flops
        if stretch.then == START:
            before[stretch.ticket] = flops
        elif stretch.then == WAIT and flops > before[stretch.ticket]:
            found.add(stretch.ticket)
    return found


class _Live:
    """The storages of one device that exist now."""

    def __init__(self) -> None:
        self.seen = False
        self._peak_bytes = 0
        self.now_bytes = 0
        self._known: dict[int, Any] = {}

    def peak_bytes(self) -> int:
        """The most bytes that were held at once since this was last called."""
        peak, self._peak_bytes = self._peak_bytes, self.now_bytes
        return peak

    def see(self, tensor: Tensor) -> None:
        self.seen = True
        storage = tensor.untyped_storage()
        key, size = storage_id(tensor), storage.nbytes()
        if key in self._known:
            return
        self.now_bytes += size
        self._peak_bytes = max(self._peak_bytes, self.now_bytes)

        def on_drop(_reference: object) -> None:
            del self._known[key]
            self.now_bytes -= size

        self._known[key] = weakref.ref(storage, on_drop)


class Meter(DispatchMode):
    """Measures one rank. `parameter_bytes`, `gradient_bytes`, `optimizer_bytes`: at the last optimizer step, 0 without;
    `trained` are the elements of all parameters there.

    Also an observer of calls (harness.ledger.Observer); `unwaited` are tickets of asynchronous calls that were never
    waited for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stretches: list[Stretch] = []
        self.parameter_bytes = self.gradient_bytes = self.optimizer_bytes = self.trained = 0
        self._flops = 0
        self._backward = False
        self._tickets = 0
        self._calls: dict[int, bool] = {}
        """The asynchronous calls under way, and whether their results wait when they are read."""
        self._works: dict[int, tuple[int, Any]] = {}
        self._live, self._on_cpu = _Live(), _Live()

    @property
    def peak_bytes(self) -> int:
        """The most bytes that tensors held at once."""
        return max((stretch.peak_bytes for stretch in self.stretches), default=0)

    @property
    def unwaited(self) -> tuple[int, ...]:
        """Tickets of asynchronous calls that were never waited for, but for results that were never read."""
        return tuple(ticket for ticket, when_read in self._calls.items() if not when_read)

    @contextmanager
    def on_rank(self, _rank: int) -> Iterator[None]:
        """Measure this thread inside of the body."""
        hooks = register_optimizer_step_pre_hook(self._before), register_optimizer_step_post_hook(self._after)
        try:
            with waits_of_fakes(self._note_wait), fused_attention(), self:
                yield
        finally:
            for hook in hooks:
                hook.remove()
            self._end(END, -1)
            for _ticket, kept in self._works.values():
                # The program dropped it unwaited, but torch's list would keep it for the life of the process.
                if isinstance(kept, Tensor):
                    end_functional(kept)
            self._works.clear()

    def on_issue(self, _rank: int, call: Call) -> int:
        """A call starts here."""
        ticket = self._tickets
        self._tickets += 1
        self._end(START, ticket)
        if call.is_async:
            self._calls[ticket] = waits_when_read(sys._getframe(1))
        return ticket

    def on_completion(self, rank: int, ticket: int) -> None:
        """Nothing is kept: that a call is synchronous was known when it was issued."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one operator, and count what it computes and creates."""
        if take_themselves_apart(types):
            return NotImplemented
        if (backward := current_task() != -1) != self._backward:
            self._backward = backward
            self._end(TO_BACKWARD if backward else TO_FORWARD, -1)
        words = dict(kwargs or {})
        space = func.namespace
        if space in {"_c10d_functional", "c10d"}:
            return self._note_collective(space, func, args, words)
        out = make_result(func, args, words)
        formula = FORMULAS.get(packet_of(func))
        if formula is not None:
            self._flops += formula(*args, **words, out_val=out)
        self._see(out)
        return out

    def _note_collective(self, space: str, func: Any, args: tuple[Any, ...], words: dict[str, Any]) -> Any:
        """Run an operator of a collective, and remember by which handle its call will be waited for."""
        if space != "c10d" and short_name(func) in _OF_ONE_TENSOR:
            return self._passed_on(func, args, words)
        if space != "c10d" and not has_kernel(f"{space}::{short_name(func)}", "CompositeExplicitAutograd"):
            raise NotComputed(
                f"{space}::{short_name(func)} of torch {torch.__version__} is not known to the dry engine, since on "
                "the meta device it reaches no group; legal: --engine inproc"
            )
        before = self._tickets
        out = func.redispatch(_EXPLICIT, *args, **words) if space != "c10d" else func(*args, **words)
        self._see(out)
        if self._tickets > before and before in self._calls:
            for handle, kept in _handles_of_call(space, out):
                self._works[handle] = (before, kept)
        return out

    def _passed_on(self, func: Any, args: tuple[Any, ...], words: dict[str, Any]) -> Any:
        """Run an operator on the result of a functional collective. It waits for the call, or returns another tensor,
        by which the call is known too.
        """
        handle = storage_id(args[0])
        if short_name(func) == "_wrap_tensor_autograd":  # its meta kernel makes a tensor that nobody can wait for
            return func.redispatch(_EXPLICIT, *args, **words)
        out = func(*args, **words)
        ticket, kept = self._works.get(handle, (-1, None))
        if kept is not None and short_name(func) == "wait_tensor":
            end_functional(kept)
            self._note_wait(handle)
        elif kept is not None:
            self._works[storage_id(out)] = ticket, kept
        return out

    def _see(self, out: Any) -> None:
        if isinstance(out, Tensor):
            if out.is_meta or out.is_cpu:
                (self._live if out.is_meta else self._on_cpu).see(out)
        elif isinstance(out, tuple | list):
            for part in out:
                self._see(part)

    def _note_wait(self, handle: int) -> None:
        """Note that the call of a handle is waited for; only the first time counts."""
        ticket, _kept = self._works.pop(handle, (-1, None))
        if self._calls.pop(ticket, None) is not None:
            self._end(WAIT, ticket)

    def _end(self, then: str, ticket: int) -> None:
        meta_bytes, cpu_bytes = self._live.peak_bytes(), self._on_cpu.peak_bytes()
        peak_bytes, live = (meta_bytes, self._live) if self._live.seen else (cpu_bytes, self._on_cpu)
        self.stretches.append(Stretch(self._flops, then, ticket, peak_bytes, live.now_bytes))
        self._flops = 0

    def _before(self, optimizer: Optimizer, _args: object, _words: object) -> None:
        """Parameters and gradients, while both are there."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.trained = sum(p.numel() for p in parameters)
        self.parameter_bytes = _count_bytes(parameters)
        buffers = {storage_id(p.grad): p.grad.untyped_storage() for p in parameters if p.grad is not None}
        self.gradient_bytes = sum(buffer.nbytes() for buffer in buffers.values())

    def _after(self, optimizer: Optimizer, _args: object, _words: object) -> None:
        state = optimizer.state.items()
        kept = [x for p, of in state for x in of.values() if isinstance(x, Tensor) and x.device == p.device]
        self.optimizer_bytes = _count_bytes(kept)


def _count_bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _handles_of_call(space: str, out: Any) -> Iterator[tuple[int, Any]]:
    """The handles by which a call will be waited for, each with what must be kept so that no other call gets it."""
    parts = out if isinstance(out, tuple | list) else (out,)
    for part in parts:
        if isinstance(part, torch.ScriptObject):
            # Python knows a C++ work by one object as long as that lives: the one that the program will wait for.
            work = dist.Work.unbox(part)
            yield id(work), work
        elif space != "c10d" and isinstance(part, Tensor):
            yield storage_id(part), part


FORMULAS: dict[Any, Callable[..., int]] = {
    **flop_counter.flop_registry,
    FUSED: flop_counter.shape_wrapper(lambda q, k, v, *_, **__: flop_counter.sdpa_flop_count(q, k, v)),
    FUSED_BACKWARD: flop_counter.shape_wrapper(
        lambda grad, q, k, v, *_, **__: flop_counter.sdpa_backward_flop_count(grad, q, k, v)
    ),
}
"""FLOPs of operators by their packets, from shapes: torch's formulas, and those of attention on CPUs."""
_OF_ONE_TENSOR = ("wait_tensor", "_wrap_tensor_autograd")
"""Functional operators that send nothing."""
_EXPLICIT = dispatch_keys("CompositeExplicitAutograd")
"""Where the implementation of functional collectives lies that issues the call."""


MOST_RANKS = 9
"""The most ranks that are run: all places of a mesh of two axes."""
Axes = Mapping[str, tuple[tuple[int, ...], ...]]


def representatives(axes: Axes, world_size: int, most: int = MOST_RANKS) -> tuple[tuple[int, ...], int]:
    """One rank of every place, in order, and the number of places; at most `most` ranks.

    The first and the last rank come before the others, then the lowest rank of each place. These share groups with the
    first rank wherever a place allows it.
    """
    places: list[tuple[str, ...]] = [()] * world_size
    for ranks in (ranks for lists in axes.values() for ranks in lists if len(ranks) > 1):
        middle = ["middle"] * (len(ranks) - 2)
        for rank, where in zip(ranks, ("first", *middle, "last"), strict=True):
            places[rank] = (*places[rank], where)
    lowest: dict[tuple[str, ...], int] = {}
    for rank, place in enumerate(places):
        lowest.setdefault(place, rank)
    ends = (0,) if most == 1 else (0, world_size - 1)
    others = [rank for place, rank in lowest.items() if place not in {places[end] for end in ends}]
    chosen = {*ends, *others[: max(0, most - len(ends))]}
    return tuple(sorted(chosen)), len(lowest)


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRank:
    """A rank that was run.

    `stretches` are what it computes between its calls; their tickets are the events' `call_index`. `unwaited` are calls
    that were never waited for. `saved_bytes` is the most that autograd held for backward, `peak_bytes` the most that
    all tensors held at once. Parameters are those of the models, gradients and optimizer those of the last optimizer
    step. `trained` are the elements that the optimizer steps, `learned` those of the models' parameters that require a
    gradient. `learned` is more where data ranks share the optimizer's work.
    """

    rank: int
    events: tuple[Event, ...]
    stretches: tuple[Stretch, ...]
    unwaited: tuple[Event, ...]
    trained: int
    learned: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    saved_bytes: int
    peak_bytes: int

    @property
    def flops(self) -> int:
        """All that this rank computes."""
        return sum(stretch.flops for stretch in self.stretches)


def dry_run(
    case: CaseLike, subject: Subject, engine: DryEngine, ranks: Sequence[int], *, text: str, timeout_s: float = 60.0
) -> tuple[DryRank, ...]:
    """The ranks, run in this order. Raises what the engine raises: NoNumbers when the subject looks at a value."""
    axes = named_axes(case, subject)
    run = []
    for rank in ranks:
        recorder = Recorder(text, case.mode, case.world_size, axes)
        meter, saved = Meter(), SavedActivations()

        def program(rank: int, recorder: Recorder, meter: Meter, saved: SavedActivations) -> None:
            with recorder.on_rank(rank), saved.on_rank(rank), meter.on_rank(rank):
                call_subject(subject, case, torch.device("meta"))

        with recorder, chdir("."), session(subject):
            request = RunRequest(
                program=program,
                args=(recorder, meter, saved),
                world_size=case.world_size,
                seed=case.seed,
                timeout_s=timeout_s,
                per_rank=kept_per_rank(subject),
            )
            engine.run_ranks(request, (rank,), recorder, meter)
        run.append(_of_rank(rank, recorder, meter, saved))
    return tuple(run)


def _of_rank(rank: int, recorder: Recorder, meter: Meter, saved: SavedActivations) -> DryRank:
    events = tuple(recorder.events())
    tensors = (
        {id(one): one for model in recorder.models(rank) for one in model.parameters()}.values()
        if meter.trained
        else ()
    )
    open_calls = set(meter.unwaited)
    return DryRank(
        rank=rank,
        events=events,
        stretches=tuple(meter.stretches),
        unwaited=tuple(event for event in events if event.call_index in open_calls),
        trained=meter.trained,
        learned=max(meter.trained, sum(one.numel() for one in tensors if one.requires_grad)),
        parameter_bytes=sum(one.numel() * one.element_size() for one in tensors) or meter.parameter_bytes,
        gradient_bytes=meter.gradient_bytes,
        optimizer_bytes=meter.optimizer_bytes,
        saved_bytes=saved.peak_bytes(rank),
        peak_bytes=meter.peak_bytes,
    )
