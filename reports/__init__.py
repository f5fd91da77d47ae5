"""Shows runs; it computes nothing itself.

commands    the command line, a file a command     options     what its options request
stored      run folders as files and frames        printing    tables of text
comparing   two runs, or modes, side by side       predicting  layouts on a cluster that is not here
pages       the HTML page and its drawings
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reports.stored.frames import Run

__all__ = ["load"]


def load(run: str | Path = "runs/latest") -> Run:
    """The former place of `shardproof.load`, for one release; with a DeprecationWarning."""
    from reports.stored import frames  # noqa: PLC0415  (pandas, which the command line need not wait for)

    warnings.warn("reports.load is now shardproof.load", DeprecationWarning, stacklevel=2)
    return frames.load(run)
