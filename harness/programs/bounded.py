"""Attribution for programs without end: what is older than any backward can reach is forgotten, no model kept alive."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

from torch import nn

from harness.recording.attribution import Attribution
from harness.recording.naming import Paths
from harness.recording.updates import Look, Looks

_MARKS = 1 << 16
"""Module calls of a thread, entered and left, whose backward can still be placed."""
_TASKS = 1024
_PENDING = 4096
"""Calls that wait for what follows; a program without forwards and steps makes nothing else."""


class BoundedAttribution(Attribution):
    """Attribution whose memory does not grow with the number of steps."""

    def __init__(self) -> None:
        super().__init__()
        self.paths = _PassingPaths()

    @property
    def stepless(self) -> bool:
        """Whether forwards followed backwards without any update that could be seen."""
        return self._stepless and not self.updates

    def forget(self) -> None:
        """Drop what is too old to be needed. To be called now and then."""
        for lane in self._lanes.values():
            if len(lane.numbers) > 2 * _MARKS:
                del lane.numbers[:-_MARKS], lane.sites[:-_MARKS]
        for task in list(self._made_in)[:-_TASKS]:
            del self._made_in[task]
        self._unsure.clear()
        if len(self.pending) > _PENDING:
            self.settle()

    def settle(self) -> None:
        """Settle the calls that wait for what follows as at the end of the program."""
        self._settle("")


class _PassingPaths(Paths):
    """Paths that forget the modules and parameters of the program when the program does."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._held: list[weakref.ref[nn.Module]] = []

    @property
    def models(self) -> list[nn.Module]:
        """The models that were seen being called and are still there."""
        return [model for held in self._held if (model := held()) is not None]

    def add(self, model: nn.Module) -> None:
        """Learn a model's modules; one that holds models seen before names their modules anew."""
        if id(model) in self._of_module:
            return
        super().add(model)
        for module in model.modules():
            self._follow(module, self._of_module)
            for parameter in module.parameters(recurse=False):
                self._follow(parameter, self._of_parameter)

    def _hold(self, model: nn.Module) -> None:
        self._held = [held for held in self._held if held() is not None] + [weakref.ref(model)]

    def _follow(self, known: Any, table: dict[int, str]) -> None:
        self._alive[id(known)] = weakref.ref(known, partial(self._died, id(known), table))

    def _died(self, known: int, table: dict[int, str], _ref: object) -> None:
        table.pop(known, None)
        self._alive.pop(known, None)


class CarefulLooks(Looks):
    """Looks at parameters of any program: what cannot be looked at ends the looking, and nothing else."""

    def at(self, model: nn.Module | None = None) -> Look:
        """The values now; () once a parameter could not be looked at."""
        try:
            return super().at(model)
        except Exception:
            self.on = False
            return ()
