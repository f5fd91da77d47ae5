"""The former place of `phase` and `region`, for one release: they are `shardproof.phase` and `shardproof.region`."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from harness.recording import annotations as _annotations

if not TYPE_CHECKING:  # which would find every name here

    def __getattr__(name: str) -> object:
        """The function of this name, with a DeprecationWarning that names its new place."""
        if name not in ("phase", "region"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        warnings.warn(f"{__name__}.{name} is now shardproof.{name}", DeprecationWarning, stacklevel=2)
        return getattr(_annotations, name)
