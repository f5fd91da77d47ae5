"""Where in the user's code a call came from: the innermost frame outside torch, the harness and the library.

The library is Python's own. Called for every collective, so a look costs about a microsecond: whether a file is the
user's is remembered by its name.
Installed packages that use torch (Megatron-Core, transformers) are user code: their line is what a reader needs.
"""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import NamedTuple

import torch
import typing_extensions

__all__ = ["Caller", "caller", "caller_at", "caller_of", "is_user", "raised_at", "shortened"]

_LIBRARY = tuple({os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib")})
_INSTALLED = tuple({os.path.join(sysconfig.get_path(name), "") for name in ("purelib", "platlib")})
_OURS = (
    os.path.join(os.path.dirname(torch.__file__), ""),
    os.path.join(os.path.dirname(os.path.dirname(__file__)), ""),
    typing_extensions.__file__,  # wraps the names that torch deprecates
)


class Caller(NamedTuple):
    """A line of the user's code. The text is "file:line in function"; the file is relative below the working folder."""

    code: CodeType
    line: int

    @property
    def place(self) -> str:
        """The line as the ledger prints it: "file:line"."""
        return f"{shortened(self.code.co_filename)}:{self.line}"

    def __str__(self) -> str:
        return f"{self.place} in {self.code.co_name}"


def caller_at(frame: FrameType | None) -> Caller | None:
    """The innermost user line at or above `frame`; None when there is none."""
    while frame is not None:
        code = frame.f_code
        if is_user(code.co_filename):
            return Caller(code, frame.f_lineno)
        frame = frame.f_back
    return None


def caller() -> str:
    """The line of the user's code that is calling now, as "file:line"; "" when nobody's is."""
    found = caller_at(sys._getframe(1))
    return found.place if found is not None else ""


def caller_of(frame: FrameType | None) -> str:
    """The innermost user line at or above `frame`, as "file:line in function"; "" when there is none."""
    return str(caller_at(frame) or "")


def raised_at(traceback: TracebackType | None) -> str:
    """The innermost user line that an exception passed through, as "file:line in function"; "" when there is none."""
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
def shortened(filename: str) -> str:
    """A file name as reports print it: relative when the file is below the working folder, else in full."""
    path = Path(filename)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else filename
