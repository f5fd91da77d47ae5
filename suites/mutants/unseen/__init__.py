"""Planted bugs for a blind measurement: whoever writes rules of diagnosis has not read them."""

from __future__ import annotations

from suites.mutants.unseen.bug import Unseen
from suites.mutants.unseen.passes import PASSES
from suites.mutants.unseen.steps import STEPS

__all__ = ["UNSEEN", "Unseen"]

UNSEEN: tuple[Unseen, ...] = (*PASSES, *STEPS)
"""All of them."""
