"""What encloses a call, read from the Python stack: user code, checkpointing, another backward, optimizer steps.

Frames are compared by their code objects and left alone: looking at a frame's variables keeps them alive as long as the
frame, so that only a Function's own forward or backward is looked into, which ends soon.
"""

from __future__ import annotations

from types import CodeType, FrameType
from typing import Any

import torch
from torch.autograd.graph import _engine_run_backward
from torch.optim.optimizer import Optimizer
from torch.utils import checkpoint

from harness.recording.callers import caller_at, is_user
from harness.recording.moments import OUTSIDE

__all__ = ["around", "defined_in", "quiet_since", "steps_around"]


def defined_in(function: Any) -> CodeType:
    """The code of the function that a function defines and returns."""
    return next(constant for constant in function.__code__.co_consts if isinstance(constant, CodeType))


_APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]
_BACKWARD = _engine_run_backward.__code__
_STEP = defined_in(Optimizer.profile_hook_step)
_CHECKPOINT = checkpoint.__file__


def around(frame: FrameType | None, *, in_backward: bool) -> tuple[tuple[CodeType, int] | None, bool, int]:
    """The caller in user code; in backward also whether checkpointing runs a function again, and the outer node.

    That is the node of another backward whose own backward started this one; OUTSIDE when there is none. The caller is
    a plain code and line (callers.Caller), since this is looked up for every call: a look costs about a microsecond.
    """
    caller, again = None, False
    while frame is not None:
        code = frame.f_code
        if caller is None and is_user(code.co_filename):
            caller = (code, frame.f_lineno)
            if not in_backward:
                return caller, False, OUTSIDE
        if in_backward:
            if code is _BACKWARD:
                return caller or caller_at(frame), again, OUTSIDE if again else _outer(frame)
            again = again or code.co_filename == _CHECKPOINT
        frame = frame.f_back
    return caller, again, OUTSIDE


def _outer(frame: FrameType) -> int:
    """The number of the node whose backward called the backward that runs in `frame`."""
    caller: FrameType | None = frame
    for _caller in range(3):
        caller = None if caller is None else caller.f_back
        if caller is not None and caller.f_code.co_name == "backward" and caller.f_code.co_varnames[:1] == ("ctx",):
            return int(caller.f_locals["ctx"]._sequence_nr())
    return OUTSIDE


def quiet_since(frame: FrameType | None, until: CodeType) -> bool:
    """Gradients are off because the user said so, not because an autograd Function's forward runs, up to `until`."""
    inner = None
    while frame is not None and frame.f_code is not until:
        if frame.f_code is _APPLY and inner is not None and inner.f_code.co_varnames:
            context = inner.f_locals.get(inner.f_code.co_varnames[0])
            # The node of a Function that wants gradients has none to pass them on to: they were off around it.
            return any(getattr(context, "needs_input_grad", ())) and not getattr(context, "next_functions", ())
        inner, frame = frame, frame.f_back
    return True


def steps_around(frame: FrameType | None) -> int:
    """How many optimizer steps are going on."""
    count = 0
    while frame is not None:
        count += frame.f_code is _STEP
        frame = frame.f_back
    return count
