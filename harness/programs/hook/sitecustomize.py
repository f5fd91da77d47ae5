"""Imported by Python at the start of every process of a recorded program; the program's own sitecustomize still runs.

The hook imports nothing of torch. When the program has imported torch.distributed, `init_process_group` is replaced by
one that calls it and then starts the recorder (harness.programs.arming). When torch itself is imported, the recorder of
values is armed if the session wants one. An error here is one line on standard error; the program runs on without being
recorded.
"""

import importlib
import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))
_HOME = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(_HERE))))
_CALLS, _VALUES = "torch.distributed.distributed_c10d", "torch"
"""The modules after whose import calls and values are recorded."""


class _Armer:
    """A finder for one module, once: Python's own way to find it, and a function that is called after it ran."""

    def __init__(self, target: str) -> None:
        self._target = target

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The spec of the module with a loader that arms it; None for every other module."""
        if name != self._target:
            return None
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next((found for finder in others if (found := finder.find_spec(name, path, target))), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                sys.meta_path.remove(self)  # not before it runs: a program may only ask whether the module exists
                execute(module)
                _arm(module, values=name == _VALUES)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _arm(module: ModuleType, *, values: bool) -> None:
    try:
        if importlib.util.find_spec("shardproof") is None:
            sys.path.append(_HOME)  # last, so that the program's own folders are searched first, as without us
        if values:
            from shardproof.harness.programs.tensors.arming import arm_values  # noqa: PLC0415  (only torch's users pay)

            arm_values()
        else:
            from shardproof.harness.programs.arming import arm  # noqa: PLC0415  (as above)

            arm(module)
    except Exception as problem:
        sys.stderr.write(f"shardproof: this process is not recorded: {type(problem).__name__}: {problem}\n")


def _run_the_programs_own() -> None:
    """Run the sitecustomize that Python would import without this folder."""
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None:
        return
    own = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = own
    spec.loader.exec_module(own)


if __name__ == "sitecustomize":
    sys.path[:] = [place for place in sys.path if os.path.abspath(place or ".") != _HERE]
    if os.environ.get("SHARDPROOF_RECORD"):
        sys.meta_path[:0] = map(_Armer, (_CALLS, _VALUES))
    _run_the_programs_own()
