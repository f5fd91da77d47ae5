"""The recorder of the values of one rank (harness.programs.values), which torch's hooks call (tensors.hooks).

It starts at the first forward of training of an outermost module, in the process that runs it. Rank and world size are
those of torch.distributed, else those of the launcher's environment, else of a single rank. Launchers and workers of
data loaders do not train, so they record nothing. A step ends when its optimizers have stepped for all parameters, else
at the next forward of training. Exceptions are handled as in harness.programs.rank. No collective is issued, and only
copies wait for a device.
"""

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardproof.harness.programs.session import ProgramSession, ValueOptions, report_failure
from shardproof.harness.programs.tensors import numerics
from shardproof.harness.programs.tensors.initial_values import InitialValues
from shardproof.harness.programs.tensors.layouts import tensors_in
from shardproof.harness.programs.tensors.modules import ModuleValues
from shardproof.harness.programs.tensors.names import Enclosing, Names
from shardproof.harness.programs.tensors.store import StepValues
from shardproof.harness.programs.tensors.updates import UpdateValues
from shardproof.harness.programs.values import FOLDER, write_about
from shardproof.harness.torch_internals.autograd import current_task

_OUTSIDE, _RECORDS, _AGAIN = 0, 1, 2


class _Thread(threading.local):
    """The modules that a thread is in, outermost first, and what to do with their outputs."""

    def __init__(self) -> None:
        self.inside: list[nn.Module] = []
        self.mode = _OUTSIDE


class ValueRecorder:
    """Records the values of the session's steps that a rank computes.

    `begun` is called before the rank's first forward of training, and an exception in it ends the recording; `ended` is
    called when all steps are recorded. `enclosing` knows which modules of this process contain which.
    """

    def __init__(
        self,
        session: ProgramSession,
        options: ValueOptions,
        enclosing: Enclosing,
        begun: Callable[[], object],
        ended: Callable[[], object],
    ) -> None:
        self._session, self._options = session, options
        self._begun, self._stopped = begun, ended
        self._folder = Path(session.folder)
        self._on, self._pid, self._rank = True, 0, 0
        self._step, self._stepped, self._ended, self._stepping = 0, False, False, 0
        self._local = _Thread()
        self._about: dict[str, Any] = {"steps": [], "done": False}
        self._names, self._enclosing = Names(), enclosing
        self._store = StepValues(budget_bytes=int(options.budget_gib * 2**30))
        self._modules = ModuleValues(store=self._store, names=self._names, guard=self._guard)
        self._updates = UpdateValues(store=self._store, names=self._names)
        self._initial = InitialValues(options.same_init, options.parts_of)

    @property
    def _takes(self) -> bool:
        """Whether values of the current step are recorded."""
        return bool(self._on and self._pid and not self._ended and self._session.covers(self._step))

    def _guard(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function of ours. An exception in it ends the recording, and never reaches the program."""
        if not self._on:
            return None
        try:
            return function(*args)
        except Exception as problem:
            self._let_go(problem)
        return None

    def call(
        self, original: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], words: dict[str, Any]
    ) -> Any:
        """The result of a module that the program calls; `original` is torch's way to call it."""
        if not self._on:
            return original(module, *args, **words)
        local = self._local
        if not local.inside:
            if self._options.dtype:
                args, words = self._guard(numerics.convert_call, module, args, words) or (args, words)
            self._guard(self._enter, module, args, words)
        elif local.mode == _RECORDS:
            self._guard(self._modules.look_for_draws, local.inside[-1])
        local.inside.append(module)
        try:
            return original(module, *args, **words)
        finally:
            local.inside.pop()
            if not local.inside:
                local.mode = _OUTSIDE

    def _enter(self, module: nn.Module, args: tuple[Any, ...], words: dict[str, Any]) -> None:
        """An outermost module is called."""
        self._local.mode = _OUTSIDE
        if self._pid not in (0, os.getpid()):  # a fork of a rank that trains
            self._on = False
            return
        if current_task() != -1:
            self._local.mode = _AGAIN if self._takes else _OUTSIDE
            return
        if not _trains(module, (args, words)):
            return
        if not self._pid:
            self._begin()
        if self._stepped:
            self._end_step()
            self._step, self._stepped, self._ended, self._stepping = self._step + 1, False, False, 0
        if not self._takes:
            if self._session.steps is not None and self._step >= self._session.steps[1]:
                self._stop()
            return
        if self._step != self._store.step or not self._store.number:
            self._store.step = self._step
            self._modules.begin_step()
            self._updates.begin_step()
        root = self._enclosing.find_outermost(module)
        if id(root) not in self._names.roots:
            self._register(root)
        place = self._names.modules.get(id(module))
        self._modules.enter(module, self._names.roots[id(root)][1] if place is None else place.name, args, words)
        self._local.mode = _RECORDS

    def _begin(self) -> None:
        """This process trains: record it as its rank. Raises FileExistsError if another process has recorded as this
        rank.
        """
        worker: Any = getattr(sys.modules.get("torch.utils.data"), "get_worker_info", lambda: None)
        if worker() is not None:
            self._on = False
            return
        self._pid = os.getpid()
        self._rank, self._about["world_size"] = _rank_and_world()
        (self._folder / FOLDER).mkdir(exist_ok=True)
        (self._folder / FOLDER / f"rank-{self._rank}.jsonl").open("x").close()
        self._begun()
        numerics.begin_training(self._options)

    def _register(self, module: nn.Module) -> None:
        """An outermost module is called for the first time: record its parameters as those before the first step."""
        numerics.prepare_module(module, self._options)
        parameters, buffers = self._names.register(module)
        self._initial.overwrite([*parameters, *buffers])
        keys: dict[str, tuple[str, ...]] = {}
        for kind, found in (("param", parameters), ("buffer", buffers)):
            for named in found:
                row = self._store.make_row(kind, named.place, alias_of=named.alias_of)
                if named.alias_of:
                    self._store.repeat(row, keys.get(named.alias_of, ()))
                else:
                    keys[named.place.name] = self._store.add(row, named.tensor, named.split)

    def on_output(self, module: nn.Module, output: object) -> None:
        """A module has returned."""
        mode = self._local.mode
        if mode:
            self._guard(self._modules.leave if mode == _RECORDS else self._modules.leave_again, module, output)

    def on_backward(self, tensors: Any, gradients: Any) -> None:
        """Backward is about to begin from these tensors, with these gradients of theirs."""
        if self._takes and current_task() == -1:
            self._guard(self._updates.take_losses, tensors, gradients)

    def on_replaced(self, result: Tensor) -> None:
        """The memory of this tensor, which may be a loss, is about to be replaced."""
        if self._takes:
            self._guard(self._updates.keep_loss, result)

    def on_clipping(self, parameters: list[Tensor]) -> None:
        """The gradients of these parameters are about to be clipped."""
        if self._takes:
            self._guard(self._updates.take_gradients, parameters)

    def on_norm(self, norm: object) -> None:
        """Clipping has found this norm."""
        if self._takes:
            self._guard(self._updates.take_norm, norm)

    def on_message(self, source: int) -> None:
        """A message of another rank is about to be received, or one sent (messages.SENT): the first one is noted."""
        self._about.setdefault("fed_by", source)

    def on_stepping(self, optimizer: Any, args: tuple[Any, ...], words: dict[str, Any]) -> Any:
        """An optimizer's step begins. If it has a closure, its gradients exist only after the closure was called."""
        self._stepping += 1
        given = args[1] if len(args) > 1 else words.get("closure")
        if not callable(given):
            self._on_received(optimizer)
            return None

        def closure() -> Any:
            result = given()
            self._on_received(optimizer)
            return result

        return ((args[0], closure, *args[2:]), words) if len(args) > 1 else (args, {**words, "closure": closure})

    def _on_received(self, optimizer: Any) -> None:
        if self._takes:
            self._guard(self._updates.take_received, optimizer)

    def on_stepped(self) -> None:
        """An optimizer's step has ended."""
        self._stepping -= 1
        if not self._pid or not self._on:
            return
        self._stepped = True
        if self._stepping <= 0 and current_task() == -1 and self._takes and self._updates.covered:
            self._guard(self._end_step)

    def _end_step(self) -> None:
        """Record the results of the step, and write it."""
        if not self._takes:
            return
        self._updates.take_after()
        self._write()
        self._ended = True

    def _write(self) -> None:
        if self._stepped:
            self._about["steps"].append(self._step)
        narrow = {row.name: row.dtype for row in self._store.rows if row.dtype in numerics.NARROW}
        if self._options.dtype and narrow:
            self._about["narrow"] = {**narrow, **self._about.get("narrow", {})}
        self._store.write(self._folder, self._rank)
        asked = self._session.steps
        self._about |= {
            "done": asked is not None and self._step >= asked[1] - 1 and self._stepped,
            "drawn": list(self._modules.drawn),
            "wrappers": sorted(self._names.wrappers),
            "same_init": self._initial.lacking,
            "drawn_parts": self._initial.drawn,
            "options": {
                "dtype": self._options.dtype,
                "dropout": self._options.dropout,
                "same_init": bool(self._options.same_init),
            },
        }
        write_about(self._folder, self._rank, self._about)

    def _stop(self) -> None:
        """All requested steps are over."""
        self._on = False
        self._local.mode = _OUTSIDE
        self._stopped()
        self._names.clear()
        self._modules.begin_step()
        self._updates.begin_step()

    def end(self) -> None:
        """The program exits normally: write the last step."""
        if self._on and self._pid == os.getpid() and self._takes:
            self._guard(self._end_step if self._stepped else self._write)
        self._on = False

    def _let_go(self, problem: Exception) -> None:
        """The recorder has failed: report it once, and leave the program alone."""
        self._stop()
        self._about["failed"] = report_failure(f"rank {self._rank}: no more values are recorded", problem)
        with suppress(OSError):
            if self._pid:
                write_about(self._folder, self._rank, self._about)


def _trains(module: nn.Module, given: object) -> bool:
    """Whether a call is part of training: gradients are on, and it has parameters or arguments that
    require gradients.
    """
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return False
    tensors = [tensor for _place, tensor in tensors_in(given)]
    if any(tensor.is_meta for tensor in tensors):
        return False
    return next(module.parameters(), None) is not None or any(tensor.requires_grad for tensor in tensors)


def _rank_and_world() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    rank, world = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return (int(rank), int(world)) if rank.isdecimal() and world.isdecimal() else (0, 1)
