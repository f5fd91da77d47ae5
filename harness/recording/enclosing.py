"""Surroundings of a call by the Python stack: user code, checkpoints, recomputation, another backward, optimizer steps.

Frames are compared by their code objects and left alone: looking at a frame's variables keeps them alive as long as the
frame. Only a Function's own forward or backward is looked into, which ends soon.
"""

import os
from types import CodeType, FrameType

import torch
from torch.utils import checkpoint

from shardproof.harness.engines.calls.callers import is_user, issued_at
from shardproof.harness.recording.observations import OUTSIDE
from shardproof.harness.torch_internals.autograd import BACKWARD, STEP, function_context, number_of

_CHECKPOINT = checkpoint.__file__
_TORCH = os.path.join(os.path.dirname(torch.__file__), "")
_SAVES = os.path.join(_TORCH, "distributed", "checkpoint", "")


def around(frame: FrameType | None, *, in_backward: bool) -> tuple[tuple[CodeType, int] | None, bool, int]:
    """The caller in user code; in backward also whether checkpointing runs a function again, and the outer node.

    The outer node is the node of another backward whose own backward started this one; OUTSIDE when there is none. The
    caller is a plain code and line (callers.Caller), for every call costs such a look: about a microsecond.
    """
    caller, again = issued_at(frame), False
    while in_backward and frame is not None:
        code = frame.f_code
        if code is BACKWARD:
            return caller, again, OUTSIDE if again else _outer(frame)
        again = again or code.co_filename == _CHECKPOINT
        frame = frame.f_back
    return caller, again, OUTSIDE


def _outer(frame: FrameType) -> int:
    """The number of the node whose backward called the backward that runs in `frame`."""
    caller: FrameType | None = frame
    for _caller in range(3):
        caller = None if caller is None else caller.f_back
        if caller is not None and caller.f_code.co_name == "backward" and caller.f_code.co_varnames[:1] == ("ctx",):
            return number_of(caller.f_locals["ctx"])
    return OUTSIDE


def quiet_since(frame: FrameType | None, until: CodeType) -> bool:
    """Gradients are off because the user said so, not because an autograd Function's forward runs, up to `until`."""
    inner = None
    while frame is not None and frame.f_code is not until:
        in_forward, context = function_context(frame, inner)
        if in_forward:
            # The node of a Function that wants gradients has none to pass them on to: they were off around it.
            return any(getattr(context, "needs_input_grad", ())) and not getattr(context, "next_functions", ())
        inner, frame = frame, frame.f_back
    return True


def kept_by(frame: FrameType | None) -> tuple[bool, bool]:
    """(whether torch saves or loads a checkpoint or a state_dict, whether it makes a full copy of a DTensor).

    Looked at are torch's own frames up to the user's line: `torch.distributed.checkpoint`, `state_dict` and its like.
    """
    copies = False
    while frame is not None and not is_user(frame.f_code.co_filename):
        name, file = frame.f_code.co_name, frame.f_code.co_filename
        if file.startswith(_SAVES) or (name.endswith("state_dict") and file.startswith(_TORCH)):
            return True, copies
        copies = copies or name == "full_tensor"
        frame = frame.f_back
    return False, copies


def steps_around(frame: FrameType | None) -> int:
    """How many optimizer steps are going on."""
    count = 0
    while frame is not None:
        count += frame.f_code is STEP
        frame = frame.f_back
    return count
