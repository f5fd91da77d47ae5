"""The line of the user's code that called: not torch's, the harness's or Python's own, but that of any package."""

import contextlib
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils import _pytree

from shardproof.harness.engines.calls import callers
from shardproof.harness.engines.calls.callers import caller, caller_at, caller_of, issued_at, place_raised
from shardproof.harness.engines.threads.inproc import InprocEngine


def line_of(function: Callable[..., Any], offset: int) -> str:
    """A line of this file as reports print it."""
    name = str(Path(__file__).relative_to(Path.cwd())) if Path(__file__).is_relative_to(Path.cwd()) else __file__
    return f"{name}:{function.__code__.co_firstlineno + offset}"


def whose_call(*_: object) -> str:
    """The user line at or above the frame that called this."""
    return caller_of(sys._getframe(1))


def test_the_calling_line_is_told_and_frames_of_torch_and_of_the_library_are_passed_over() -> None:
    def program() -> list[str]:
        found = [caller(), *_pytree.tree_map(whose_call, [0])]
        with contextlib.ExitStack() as stack:
            stack.push(lambda *_: found.append(caller_of(sys._getframe(1))))
        return found

    line, *others = program()
    assert line == line_of(program, 1)
    assert others == [f"{line_of(program, at)} in program" for at in (1, 2)]


def test_frames_of_the_harness_are_passed_over_and_nobody_is_found_where_nobody_is(engine: InprocEngine) -> None:
    assert engine.run(whose_call, world_size=1) == [""]
    assert caller_of(None) == "" and caller_at(None) is None and place_raised(None) == ""


def test_the_line_that_raised_is_the_innermost_users() -> None:
    def program() -> None:
        _pytree.tree_map(int, ["no number"])

    with pytest.raises(ValueError, match="invalid literal") as problem:
        program()
    assert place_raised(problem.value.__traceback__) == f"{line_of(program, 1)} in program"


def test_installed_packages_are_user_code_and_a_file_elsewhere_is_told_in_full(tmp_path: Path) -> None:
    for file, place in ((pytest.__file__, None), (str(tmp_path / "user.py"), f"{tmp_path / 'user.py'}:1 in <module>")):
        names: dict[str, Any] = {"getframe": sys._getframe}
        exec(compile("frame = getframe()", file, "exec"), names)
        found = caller_at(names["frame"])
        assert found is not None and found.place.endswith(f"{Path(file).name}:1")
        assert place is None or caller_of(names["frame"]) == place


LAYERS = "layers.py"
_COMM = """
import torch
from probe import issued

def reduce(x, group):
    return issued(), x

class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seen):
        seen.append(reduce(x, None)[0])
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx_seen.append(reduce(grad, None)[0])
        return grad, None

ctx_seen = []

def sync(model):
    return reduce(model.weight, None)[0]
"""
_LAYERS = """
import comm
import torch

class Layer(torch.nn.Module):
    def forward(self, x):
        return self.inner(x)

    def inner(self, x):
        seen = []
        y = comm.Reduce.apply(x, seen)
        return y, seen + [comm.reduce(x, None)[0]]

class Own(torch.nn.Module):
    def forward(self, x):
        return own(x)

def own(x):
    from probe import issued
    return issued()
"""


def test_a_collective_is_issued_by_whom_it_is_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Helpers that are handed a tensor by another file are passed over, in forward and outside of modules.

    A file that communicates for its own modules, a function that picks its tensors itself, and a Function's backward
    are not.
    """
    for name, text in (("comm", _COMM), ("layers", _LAYERS), ("probe", "")):
        (tmp_path / f"{name}.py").write_text(text.strip(), encoding="ascii")
    monkeypatch.syspath_prepend(str(tmp_path))

    def issued() -> str:
        found = issued_at(sys._getframe(1))
        assert found is not None
        return f"{Path(found.code.co_filename).name} {found.code.co_name}"

    probe = importlib.import_module("probe")
    probe.issued = issued  # type: ignore[attr-defined]
    comm, layers = importlib.import_module("comm"), importlib.import_module("layers")
    try:
        x = torch.ones(2, requires_grad=True)
        y, seen = layers.Layer()(x)
        assert seen == ["layers.py inner", "layers.py inner"]
        y.sum().backward()
        assert comm.ctx_seen == ["comm.py reduce"]
        assert layers.Own()(x) == "layers.py own"
        assert comm.reduce(x, None)[0] == f"{Path(__file__).name} {sys._getframe().f_code.co_name}"
        assert comm.sync(torch.nn.Linear(1, 1)) == "comm.py reduce"
    finally:
        for name in ("comm", "layers", "probe"):
            sys.modules.pop(name, None)


def test_what_megatron_maps_is_issued_by_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their mappings are Functions in a file of their own that the files of layers call."""
    pytest.importorskip("megatron.core", reason="needs the extra `peers`")
    mappings = importlib.import_module("megatron.core.tensor_parallel.mappings")
    seen: list[str] = []

    def spy(*_: object, **__: object) -> None:
        seen.append(str(issued_at(sys._getframe(1))))

    monkeypatch.setattr(torch.distributed, "all_reduce", spy)
    monkeypatch.setattr(callers, "is_user", lambda name: name in (mappings.__file__, LAYERS))
    names: dict[str, Any] = {"reduce": mappings._ReduceFromModelParallelRegion.apply}
    exec(compile("def layer(x, group):\n    return reduce(x, group)", LAYERS, "exec"), names)
    names["layer"](torch.ones(2, requires_grad=True), SimpleNamespace(size=lambda: 2))
    assert seen == [f"{LAYERS}:2 in layer"]
