"""Mutants that whoever writes or changes rules of diagnosis never looks at: `shardproof faults` counts them apart.

Every module of this folder has a tuple `MUTANTS`, written as those of `suites.mutants.catalogue` are. A run of them
prints totals and the names of survivors, but never which of them got which place or cause: figures of mutants that a
rule was fitted to would say nothing.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil

from suites.mutants.mutant import Mutant

__all__ = ["HELD_BACK"]


def _collected() -> tuple[Mutant, ...]:
    modules = sorted(found.name for found in pkgutil.iter_modules(__path__))
    mutants = [mutant for name in modules for mutant in importlib.import_module(f"{__name__}.{name}").MUTANTS]
    return tuple(dataclasses.replace(mutant, held_back=True) for mutant in mutants)


HELD_BACK: tuple[Mutant, ...] = _collected()
"""Every mutant of the modules of this folder, marked as held back."""
