"""Shows runs: frames, tables, comparisons, the page, the trace, the command line."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reports.frames import Run

__all__ = ["load"]


def load(run: str | Path = "runs/latest") -> Run:
    """The former place of `shardproof.load`, for one release; with a DeprecationWarning."""
    from reports import frames  # noqa: PLC0415  (pandas, which the command line need not wait for)

    warnings.warn("reports.load is now shardproof.load", DeprecationWarning, stacklevel=2)
    return frames.load(run)
