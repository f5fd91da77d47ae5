"""Tells what runs came to: frames, tables, comparisons, the page, the trace, the command line. `reports.load(run)`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reports.frames import Run

__all__ = ["load"]


def load(run: str | Path = "runs/latest") -> Run:
    """The frames of a run folder: `.events`, `.summary`, `.verdicts`, `.timings`, `.memory` (reports.frames)."""
    from reports.frames import load as frames  # noqa: PLC0415  (pandas takes a second, which `--help` need not wait)

    return frames(run)
