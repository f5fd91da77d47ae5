"""Keeps torch's compiler unloaded if nothing is compiled, and from compiling this package if it is loaded.

The first optimizer or checkpoint would load it, which takes a second: both mark for it what is not to be compiled.
Until something else loads it (torch.compile) they are called without these marks, and then as torch has them.

torch calls back into this package from compiled code: groups and works, hooks, kernels, worlds. The compiler would
start at these frames too. They are not the program's, and it does not know the objects in them.
"""

import contextlib
import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils import checkpoint

_COMPILER = "torch._dynamo"
_INSTEAD = "__dynamo_disable"
"""Where torch keeps what it calls in place of a function that is never to be compiled."""
_STEP = "_use_grad"
"""The name of the function that torch wraps around the step of its optimizers."""
_OURS = __name__.partition("torch_internals")[0]
"""The beginning of the names of all modules that torch calls back, and of those that these call."""
_SHARED = 1024
"""How many ranks and runs of a process may each compile a function for themselves."""
_COMPILERS = "/torch/_dynamo/", "/torch/_inductor/"
_CALLERS = "/eval_frame.py", "/external_utils.py", "/decorators.py", "/output_code.py", "/utils.py", "/runtime/"
_FUNCTIONS = FunctionType, staticmethod, classmethod, type(functools.cache(len))
"""Kinds of functions. All but the first wrap another one, their `__wrapped__`."""


class _Unloaded:
    """The names of the compiler that torch.utils.checkpoint reads if nothing is compiled; any other name loads the
    compiler.
    """

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


def run_eagerly() -> None:
    """Let what the program has compiled run as written from now on; nothing is loaded for it."""
    if _COMPILER in sys.modules:
        torch.compiler.set_stance("force_eager")


def leave_unloaded() -> None:
    """Keep the optimizers and checkpoints of this process from loading the compiler, from now on.

    Uses `__wrapped__` and its `__dynamo_disable` of functions like Optimizer.zero_grad and of checkpoint, `__wrapped__`
    of the steps of torch.optim, and `torch._dynamo`, which torch loads when it is first looked up. If they are missing
    the compiler is loaded.
    """
    if _COMPILER in sys.modules:
        return
    vars(torch).setdefault("_dynamo", _Unloaded())
    for wrapper in _never_compiled():
        function = getattr(wrapper, "__wrapped__", None)
        if function is not None and _INSTEAD not in vars(function):
            setattr(function, _INSTEAD, _without_disable(wrapper, function))
    for kind in vars(torch.optim).values():
        step = vars(kind).get("step") if isinstance(kind, type) and issubclass(kind, Optimizer) else None
        if step is not None and getattr(getattr(step, "__code__", None), "co_name", "") == _STEP:
            kind.step = _without_graph_breaks(step)


def not_compiled(code: CodeType) -> None:
    """Keep torch.compile from starting at frames of this code: it starts at the first frame that is not torch's own.

    Uses torch._C._dynamo.eval_frame. If that is missing, torch.compile traces the frame, and calls inside compiled code
    are not seen.
    """
    with contextlib.suppress(AttributeError):
        frames: Any = torch._C._dynamo.eval_frame
        frames.set_code_exec_strategy(
            code, frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
        )


class _Loading:
    """The first finder of modules until the compiler is loaded. Then it leaves, and calls what waits for that."""

    def __init__(self) -> None:
        self.waiting: dict[Callable[[], None], None] = {}

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> Any:
        """The compiler's own spec, whose loader calls what waits; None for any other module."""
        if name != _COMPILER:
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        if spec is not None:
            execute = spec.loader.exec_module

            def exec_module(module: object) -> None:
                execute(module)
                for call in self.waiting:
                    call()

            spec.loader.exec_module = exec_module
        return spec


_LOADING = _Loading()


def when_loaded(call: Callable[[], None]) -> None:
    """Call it when the compiler is loaded: now, or once when something loads it."""
    if _COMPILER in sys.modules:
        call()
        return
    _LOADING.waiting[call] = None
    if _LOADING not in sys.meta_path:
        sys.meta_path.insert(0, _LOADING)


def is_compiler(file: str) -> bool:
    """Whether code of this file compiles, or loads the compiler. Files beside it only call compiled code (_CALLERS)."""
    return any(folder in file for folder in _COMPILERS) and not any(part in file for part in _CALLERS)


def share_compiled() -> None:
    """Let each rank and run have as many graphs of a function as a process may have: torch gives up after eight of
    them.

    A program's own limits stay. Changes the defaults of recompile_limit and accumulated_recompile_limit in
    torch._dynamo.config._config, if they exist; a value that is set holds in its own thread only.
    """
    when_loaded(_raise_limits)


@functools.cache
def _raise_limits() -> None:
    entries = getattr(sys.modules[_COMPILER].config, "_config", {})
    for name in ("recompile_limit", "accumulated_recompile_limit"):
        if isinstance(getattr(entries.get(name), "default", None), int):
            entries[name].default *= _SHARED


class Eager:
    """Compiled functions run as they are written between the first `begin` and the last `end`.

    Each `begin` has its `end`. A dispatch mode sees no operator in compiled code, and torch never compiles again what
    it has met under a mode. A compiler that is loaded later is set when it is loaded. Uses torch.compiler.set_stance.
    """

    def __init__(self) -> None:
        self._begun = 0
        self._stance: Any = None

    def begin(self) -> None:
        """From here on nothing is compiled."""
        self._begun += 1
        when_loaded(self._set)

    def end(self) -> None:
        """Take one `begin` back."""
        self._begun -= 1
        if not self._begun and self._stance is not None:
            self._stance.__exit__(None, None, None)
            self._stance = None

    def _set(self) -> None:
        if self._begun and self._stance is None:
            self._stance = torch.compiler.set_stance("force_eager")


def leave_uncompiled() -> None:
    """Keep torch.compile from starting at frames of this package. Call it again for modules imported later."""
    _keep_uncompiled(len(sys.modules))


@functools.lru_cache(maxsize=1)
def _keep_uncompiled(_modules: int) -> None:
    """Do it for the modules of now. While their number stays the same, so do the modules."""
    for name in list(sys.modules):
        if name.startswith(_OURS):
            _keep_module_uncompiled(name)


@functools.cache
def _keep_module_uncompiled(name: str) -> None:
    for value in list(vars(sys.modules[name]).values()):
        if getattr(value, "__module__", None) == name:
            for member in vars(value).values() if isinstance(value, type) else (value,):
                for code in _codes(member):
                    not_compiled(code)


def _codes(member: Any) -> Iterator[CodeType]:
    """The code of a function, a method or a property, of the functions that it defines and of those that it wraps."""
    function = member.fget if isinstance(member, property) else member
    while isinstance(function, _FUNCTIONS):
        codes = [function.__code__] if isinstance(function, FunctionType) else []
        while codes:
            code = codes.pop()
            codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
            yield code
        function = getattr(function, "__wrapped__", None)


def _never_compiled() -> list[Any]:
    """The functions of optimizers and checkpoints that torch keeps from its compiler, if it has them."""
    kept = [getattr(Optimizer, name) for name in ("add_param_group", "load_state_dict", "state_dict", "zero_grad")]
    names = ("checkpoint", "_run_fn_with_dynamo_disabled")
    return kept + [getattr(checkpoint, name) for name in names if hasattr(checkpoint, name)]


def _without_disable(wrapper: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **words: Any) -> Any:
        if _COMPILER not in sys.modules:
            return function(*arguments, **words)
        vars(function).pop(_INSTEAD, None)  # torch puts its own there
        return wrapper(*arguments, **words)

    return call


def _without_graph_breaks(step: Callable[..., Any]) -> Callable[..., Any]:
    """The step without the breaks in a compiled graph around it; gradients are on if the optimizer wants them."""
    plain: Callable[..., Any] = step.__wrapped__  # type: ignore[attr-defined]

    @functools.wraps(step)
    def call(optimizer: Optimizer, *arguments: Any, **words: Any) -> Any:
        if _COMPILER in sys.modules:
            return step(optimizer, *arguments, **words)
        with torch.set_grad_enabled(optimizer.defaults["differentiable"]):
            return plain(optimizer, *arguments, **words)

    return call
