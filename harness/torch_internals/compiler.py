"""torch's compiler left unloaded where nothing is compiled: the first optimizer or checkpoint loads it, in a second.

Both mark for it what is not to be compiled. Until something else loads it (torch.compile) they are called without
these marks, then as torch has them.
"""

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils import checkpoint

_COMPILER = "torch._dynamo"
_INSTEAD = "__dynamo_disable"
"""Where torch keeps what it calls in place of a function that is never to be compiled."""
_STEP = "_use_grad"
"""The name of the function that torch wraps around the step of its optimizers."""


class _Unloaded:
    """Names of a compiler that torch.utils.checkpoint reads with nothing to compile; any other loads the compiler."""

    def __getattr__(self, name: str) -> Any:
        if name in _FOR_CHECKPOINTS and sys._getframe(1).f_globals is vars(checkpoint):
            return _FOR_CHECKPOINTS[name]
        return getattr(importlib.import_module(_COMPILER), name)  # which takes this one's place in torch


class _Settings:
    """The setting that a checkpoint reads and hands back to the compiler where that traces it; others are loaded."""

    error_on_nested_fx_trace = None

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(_COMPILER).config, name)


_FOR_CHECKPOINTS = {"config": _Settings(), "disable": lambda function: function}


def leave_unloaded() -> None:
    """From now on the optimizers and checkpoints of this process do not load the compiler.

    Uses `__wrapped__` and its `__dynamo_disable` of Optimizer.zero_grad and its like and of checkpoint, and
    `__wrapped__` of the steps of torch.optim. `torch._dynamo`, which torch loads when it is first looked up, is used
    too. Where they are missing the compiler is loaded.
    """
    if _COMPILER in sys.modules:
        return
    vars(torch).setdefault("_dynamo", _Unloaded())
    for wrapper in _never_compiled():
        function = getattr(wrapper, "__wrapped__", None)
        if function is not None and _INSTEAD not in vars(function):
            setattr(function, _INSTEAD, _undisabled(wrapper, function))
    for kind in vars(torch.optim).values():
        step = vars(kind).get("step") if isinstance(kind, type) and issubclass(kind, Optimizer) else None
        if step is not None and getattr(getattr(step, "__code__", None), "co_name", "") == _STEP:
            kind.step = _unbroken(step)


def _never_compiled() -> list[Any]:
    """Functions of optimizers and checkpoints that torch keeps from its compiler, as far as it has them."""
    kept = [getattr(Optimizer, name) for name in ("add_param_group", "load_state_dict", "state_dict", "zero_grad")]
    names = ("checkpoint", "_run_fn_with_dynamo_disabled")
    return kept + [getattr(checkpoint, name) for name in names if hasattr(checkpoint, name)]


def _undisabled(wrapper: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **words: Any) -> Any:
        if _COMPILER not in sys.modules:
            return function(*arguments, **words)
        vars(function).pop(_INSTEAD, None)  # torch puts its own there
        return wrapper(*arguments, **words)

    return call


def _unbroken(step: Callable[..., Any]) -> Callable[..., Any]:
    """The step without the breaks of a compiled graph around it: gradients are on where the optimizer wants them."""
    plain: Callable[..., Any] = step.__wrapped__  # type: ignore[attr-defined]

    @functools.wraps(step)
    def call(optimizer: Optimizer, *arguments: Any, **words: Any) -> Any:
        if _COMPILER in sys.modules:
            return step(optimizer, *arguments, **words)
        with torch.set_grad_enabled(optimizer.defaults["differentiable"]):
            return plain(optimizer, *arguments, **words)

    return call
