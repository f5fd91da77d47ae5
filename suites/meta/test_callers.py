"""The line of the user's code that called: not torch's, the harness's or Python's own, but that of any package."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.utils import _pytree

from harness.engines.inproc import InprocEngine
from harness.recording.callers import caller, caller_at, caller_of, raised_at


def line_of(function: Callable[..., Any], offset: int) -> str:
    """A line of this file as reports print it."""
    name = str(Path(__file__).relative_to(Path.cwd())) if Path(__file__).is_relative_to(Path.cwd()) else __file__
    return f"{name}:{function.__code__.co_firstlineno + offset}"


def whose_call(*_: object) -> str:
    """The user line at or above the frame that called this."""
    return caller_of(sys._getframe(1))


def test_the_calling_line_itself() -> None:
    def program() -> str:
        return caller()

    assert program() == line_of(program, 1)


def test_frames_of_torch_are_passed_over() -> None:
    def program() -> list[str]:
        return _pytree.tree_map(whose_call, [0])  # type: ignore[no-any-return]

    assert program() == [f"{line_of(program, 1)} in program"]


def test_frames_of_the_library_are_passed_over() -> None:
    def program() -> list[str]:
        found: list[str] = []
        with contextlib.ExitStack() as stack:
            stack.push(lambda *_: found.append(caller_of(sys._getframe(1))))
        return found

    assert program() == [f"{line_of(program, 2)} in program"]


def test_frames_of_the_harness_are_passed_over() -> None:
    with InprocEngine() as engine:
        assert engine.run(whose_call, world_size=1) == [""]


def test_nobody_is_found_where_nobody_is() -> None:
    assert caller_of(None) == "" and caller_at(None) is None and raised_at(None) == ""


def test_the_line_that_raised_is_the_innermost_users() -> None:
    def program() -> None:
        _pytree.tree_map(int, ["no number"])

    with pytest.raises(ValueError, match="invalid literal") as problem:
        program()
    assert raised_at(problem.value.__traceback__) == f"{line_of(program, 1)} in program"


def test_installed_packages_are_user_code() -> None:
    names: dict[str, Any] = {"getframe": sys._getframe}
    exec(compile("frame = getframe()", pytest.__file__, "exec"), names)
    found = caller_at(names["frame"])
    assert found is not None and found.place.endswith(f"{Path(pytest.__file__).name}:1")


def test_a_file_elsewhere_is_told_in_full(tmp_path: Path) -> None:
    names: dict[str, Any] = {"getframe": sys._getframe}
    exec(compile("frame = getframe()", str(tmp_path / "user.py"), "exec"), names)
    assert caller_of(names["frame"]) == f"{tmp_path / 'user.py'}:1 in <module>"
