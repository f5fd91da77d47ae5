"""Where in the user's code a call or an exception came from: outside torch, the harness and Python's own library.

`caller_at` is the innermost line. `issued_at`, for collectives, skips functions that only communicate for others: those
of the innermost file if another file passed them a tensor (`all_reduce(x, group)`), then files whose short autograd
Function runs in forward (Megatron's `mappings.py`). The search ends at the forward of the module that runs, a
Function's backward, a hook, or the program's start. So a file that communicates for itself is its own caller.

`issued_at` is called for every collective, and takes one or two microseconds: facts of a file, and whether a function
receives tensors, are remembered. Installed packages that use torch (Megatron-Core, transformers) are user code: their
line is what a reader needs.
"""

import functools
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import NamedTuple

import torch
import typing_extensions
from torch.autograd import function, graph
from torch.nn.modules import module

from shardproof.harness.errors import error_text, install_text
from shardproof.harness.torch_internals.autograd import BACKWARD
from shardproof.harness.torch_internals.world import FUNCTIONAL

_LIBRARY = tuple({os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib")})
_INSTALLED = tuple({os.path.join(sysconfig.get_path(name), "") for name in ("purelib", "platlib")})
_OURS = (
    os.path.join(os.path.dirname(torch.__file__), ""),
    os.path.join(Path(__file__).parents[2], ""),  # the harness
    typing_extensions.__file__,  # wraps deprecated names of torch
)

_HARNESS = _OURS[1]
_COMPUTES = 600
"""The most bytes of code in the forward of a Function that only communicates, of which the largest known have 500. A
longer forward computes something (a loss).
"""
_STARTS = {module.__file__, graph.__file__}  # call modules, and hooks of backward
_HANDED: dict[tuple[str, int], bool] = {}  # (file, first line) of a function -> whether it received a tensor


class Caller(NamedTuple):
    """A line of the user's code. The text is "file:line in function"; the file is relative below the working folder."""

    code: CodeType
    line: int

    @property
    def place(self) -> str:
        """The line as the ledger prints it: "file:line"."""
        return f"{shorten_path(self.code.co_filename)}:{self.line}"

    def __str__(self) -> str:
        return f"{self.place} in {self.code.co_name}"


def caller_at(frame: FrameType | None) -> Caller | None:
    """The innermost user line at or above `frame`; None if there is none."""
    while frame is not None:
        code = frame.f_code
        if is_user(code.co_filename):
            return Caller(code, frame.f_lineno)
        frame = frame.f_back
    return None


def issued_at(frame: FrameType | None) -> Caller | None:
    """The user line for which a collective is issued at or below `frame`, past helpers; None if there is none."""
    line: Caller | None = None
    entry: FrameType | None = None  # the outermost frame so far of the file of `line`
    helps = True  # the file communicates for others if it is the innermost one, or its autograd Function runs
    while frame is not None:
        code = frame.f_code
        name = code.co_filename
        if is_user(name):
            if line is None or name != line.code.co_filename:
                if entry is not None and not (helps and _is_handed_tensors(entry)):
                    return line
                helps = line is None
                line = Caller(code, frame.f_lineno)
            entry = frame
        elif line is not None:
            if name in _STARTS or code is BACKWARD or name.startswith(_HARNESS):
                return line
            if name == function.__file__ and entry is not None:  # the function of `entry` is a Function's forward
                if len(entry.f_code.co_code) > _COMPUTES:
                    return line
                helps = True
        frame = frame.f_back
    return line


def waits_when_read(frame: FrameType | None) -> bool:
    """Whether a call that is issued at or below `frame` comes from torch's functions of functional collectives.

    Such a result waits by itself when it is read, so one for which nothing has waited was never read. An operator of
    `torch.ops` that the program calls itself returns a plain tensor.
    """
    while frame is not None and not is_user(frame.f_code.co_filename):
        if frame.f_code.co_filename == FUNCTIONAL and frame.f_code.co_name != "__torch_dispatch__":
            return True
        frame = frame.f_back
    return False


def _is_handed_tensors(frame: FrameType) -> bool:
    """Whether a function had a tensor among its arguments when it was first seen."""
    code = frame.f_code
    key = code.co_filename, code.co_firstlineno
    known = _HANDED.get(key)
    if known is None:
        taken = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        known = _HANDED[key] = any(isinstance(frame.f_locals.get(name), torch.Tensor) for name in taken)
    return known


def caller() -> str:
    """The line of the user's code that is calling now, as "file:line"; "" if there is none."""
    found = caller_at(sys._getframe(1))
    return found.place if found is not None else ""


def caller_of(frame: FrameType | None) -> str:
    """The innermost user line at or above `frame`, as "file:line in function"; "" if there is none."""
    return str(caller_at(frame) or "")


def place_raised(traceback: TracebackType | None) -> str:
    """The innermost user line that an exception passed through, as "file:line in function"; "" if there is none."""
    found = None
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if is_user(code.co_filename):
            found = Caller(code, traceback.tb_lineno)
        traceback = traceback.tb_next
    return str(found or "")


@functools.lru_cache(maxsize=4096)
def is_user(filename: str) -> bool:
    """Whether a file holds user code."""
    if filename.startswith("<") or filename.startswith(_OURS):
        return False
    return filename.startswith(_INSTALLED) or not filename.startswith(_LIBRARY)


@functools.lru_cache(maxsize=4096)
def shorten_path(filename: str) -> str:
    """A file name as reports print it: relative if the file is below the working folder, else in full."""
    path = Path(filename)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else filename


def what_led_to(error: BaseException) -> str:
    """A clause on the exception that caused a rank's exception, and advice on a missing package; "" without either.

    "; its cause is ValueError: 4 entries for 2 parameters, at buckets.py:7 in fill".
    """
    inner = _chain_of(error)[-1]
    place = place_raised(inner.__traceback__)
    # An outer exception may repeat the text of its cause.
    told = inner is error or (not place and str(inner) in str(error))
    cause = "" if told else f"; its cause is {error_text(inner)}" + (f", at {place}" if place else "")
    advice = install_text(inner)
    return cause + (f"; {advice}" if advice else "")


def frames_left(error: BaseException) -> Iterator[FrameType]:
    """The frames that an exception left, the outermost first, then those of each exception that led to it."""
    for one in _chain_of(error):
        traceback = one.__traceback__
        while traceback is not None:
            yield traceback.tb_frame
            traceback = traceback.tb_next


def _chain_of(error: BaseException) -> list[BaseException]:
    """The exception and those that led to it, back to the first, without those that Python does not print."""
    chain = [error]
    while (before := error.__cause__ or (None if error.__suppress_context__ else error.__context__)) is not None:
        if any(before is one for one in chain):
            break
        chain.append(error := before)
    return chain
