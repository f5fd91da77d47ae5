"""Whether autograd asks for the gradient of what a call sends, told when the call is issued.

Autograd cannot see a collective, so that whoever wants its gradient wraps it in a Function, in whose forward gradients
are off: there its inputs tell. A copy of an input counts as the input where all inputs want a gradient.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Sequence
from types import FrameType

import torch
from torch import Tensor
from torch.utils import checkpoint

from harness.torch_internals.autograd import function_context

_MOVES = ("all_to_all", "reduce_scatter")
"""Ops whose gradient goes back as another call (harness.checking.laws)."""


def needs_gradient(op: str, payload: Sequence[Tensor]) -> bool:
    """Whether a gradient must come back for what a call issued now sends; False for ops that are no move, and where it
    is not certain: of leaves outside of a Function, where gradients are off, and of what torch's C++ Functions issue.
    """
    if op not in _MOVES:
        return False
    if torch.is_grad_enabled():
        return any(tensor.requires_grad and not tensor.is_leaf for tensor in payload)
    frame: FrameType | None = sys._getframe(1)
    inner: FrameType | None = None
    while frame is not None and frame.f_code.co_filename != checkpoint.__file__:
        in_forward, context = function_context(frame, inner)
        if in_forward:
            given = [tensor for tensor in _arguments(frame) if tensor.is_floating_point()]
            wanted = any(tensor.requires_grad for tensor in payload) or all(tensor.requires_grad for tensor in given)
            # Where gradients were off around the Function, its node has none to pass them on to.
            return bool(given) and wanted and bool(getattr(context, "next_functions", True))
        inner, frame = frame, frame.f_back
    return False


def _arguments(frame: FrameType) -> Iterator[Tensor]:
    """The tensors that the function of a frame was called with."""
    code = frame.f_code
    varying = sum(bool(code.co_flags & flag) for flag in (inspect.CO_VARARGS, inspect.CO_VARKEYWORDS))
    for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + varying]:
        value = frame.f_locals.get(name)
        for part in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(part, Tensor):
                yield part
