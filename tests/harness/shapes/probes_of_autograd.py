"""The private names of torch on autograd, modes, the compiler and memory: each is tried."""

import sys
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.utils import checkpoint

from shardproof.harness.torch_internals.autograd import (
    called_by,
    current_node,
    current_task,
    function_context,
    has_hooks,
    next_number,
    number_of,
    storage_id,
    version_of,
    when_backward_ends,
    without_version,
)
from shardproof.harness.torch_internals.compiler import _COMPILER, _never_compiled, leave_unloaded
from shardproof.harness.torch_internals.dispatch import DispatchMode, copy_each, modes_are_on, thread_switches, unseen
from tests.harness.shapes.probe import Probe, probe


@probe(
    "phases and modules of recorded calls",
    names="torch._C._current_graph_task_id _current_autograd_node _autograd._get_sequence_nr Node._sequence_nr",
    otherwise="nothing can be recorded: MachineError",
)
def _numbers_backward() -> bool:
    """A backward has a task, a node and numbers, and there are none outside it."""
    seen: list[tuple[int, int, bool]] = []
    leaf = torch.ones(2, requires_grad=True)
    first = leaf * 2
    numbers = number_of(first.grad_fn), next_number()
    first.register_hook(lambda _gradient: seen.append((current_task(), 0, current_node() is not None)))
    ends: list[int] = []
    first.register_hook(lambda _gradient: when_backward_ends(lambda: ends.append(1)))
    first.sum().backward()
    outside = current_task() == -1 and current_node() is None
    return numbers[0] + 1 == numbers[1] and outside and len(seen) == 1 and seen[0][0] >= 0 and ends == [1]


class _Twice(Function):
    """A Function that checks whether its forward is recognised from its frames."""

    seen: bool = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        frame: FrameType | None = sys._getframe()
        inner: FrameType | None = None
        while frame is not None and not _Twice.seen:
            inside, context = function_context(frame, inner)
            _Twice.seen = inside and context is ctx
            frame, inner = frame.f_back, frame
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 2


@probe(
    "metrics distinguished from the forward of an autograd Function",
    names="Function.apply.__func__, or FunctionCtx in the frame of a Function's forward",
    otherwise="a loss in a module without parameters may be recorded as a metric",
)
def _knows_forward() -> bool:
    _Twice.seen = False
    _Twice.apply(torch.ones(2, requires_grad=True))
    return _Twice.seen


@probe("modules watched from outside", names="torch.nn.Module._call_impl", otherwise="calls have no module")
def _is_called() -> bool:
    calls: list[int] = []
    with called_by(lambda original: lambda module, *given: calls.append(1) or original(module, *given)):  # type: ignore[func-returns-value]
        nn.Identity()(torch.ones(1))
    return calls == [1]


@probe(
    "missing sums located in the module that leaves them out",
    names="torch.nn.Module._forward_hooks _forward_pre_hooks",
    otherwise="the place may be a torch.nn module in place of the one around it",
)
def _sees_hooks() -> bool:
    bare, hooked = nn.Identity(), nn.Identity()
    hooked.register_forward_hook(lambda *_: None)
    return has_hooks(hooked) and not has_hooks(bare)


@probe(
    "faults that autograd does not notice",
    names="torch.autograd._unsafe_preserve_version_counter",
    otherwise="autograd may refuse a tensor that a fault has overwritten",
)
def _counts_no_change() -> bool:
    tensor = torch.ones(1)
    before = version_of(tensor)
    with without_version((tensor,)):
        tensor.add_(1)
    return version_of(tensor) == before


@probe(
    "steps of programs that update parameters by hand on a GPU",
    names="torch.Tensor._version",
    otherwise="they count as micro-batches of step 0",
)
def _counts_changes() -> bool:
    tensor = torch.ones(1)
    before = version_of(tensor)
    tensor.add_(1)
    return version_of(tensor) > before


@probe(
    "optimizers and checkpoints without torch's compiler",
    names="Optimizer.zero_grad and checkpoint, their __wrapped__.__dynamo_disable; SGD.step.__wrapped__; _dynamo",
    otherwise="the first optimizer or checkpoint of a process takes a second longer",
)
def _stays_unloaded() -> bool:
    if _COMPILER in sys.modules:  # then it is too late for a trial: only the names are looked at
        return all(hasattr(wrapper, "__wrapped__") for wrapper in _never_compiled())
    leave_unloaded()
    weight = torch.ones(1, device="cpu", requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    optimizer.zero_grad()
    checkpoint.checkpoint(torch.square, weight, use_reentrant=False).backward()
    optimizer.step()
    return _COMPILER not in sys.modules


class _Counting(DispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@probe(
    "collectives of the in-process engine that autograd and modes do not see",
    names="torch._C._AutoDispatchBelowAutograd _DisableTorchDispatch _len_torch_dispatch_stack; _foreach_copy_",
    otherwise="torch.no_grad stands for it; dispatch modes see what collectives compute",
)
def _hides() -> bool:
    leaf, counting = torch.ones(2, requires_grad=True), _Counting()
    out = torch.zeros(2)
    with counting, unseen():
        copy_each([out], [leaf * 2])
    version = out._version
    with counting:
        on, _twice = modes_are_on(), leaf * 2
    return counting.count == 1 and bool(on) and not modes_are_on() and version == 1 and not out.requires_grad


@probe(
    "threads used again",
    names="torch._C._dispatch_tls_local_include_set _dispatch_tls_local_exclude_set",
    otherwise="every rank gets a new thread, 0.3 ms each",
)
def _shows_switches() -> bool:
    before = thread_switches()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = thread_switches()
    return before == thread_switches() != inside


@probe(
    "memory counted by storage",
    names="UntypedStorage._cdata",
    otherwise="the identity of the Python object stands for it",
)
def _one_storage_one_number() -> bool:
    whole = torch.empty(4, device="meta")
    return storage_id(whole) == storage_id(whole[1:]) != storage_id(torch.empty(4, device="meta"))


PROBES = tuple(one for one in tuple(globals().values()) if isinstance(one, Probe))
