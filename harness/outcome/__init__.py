"""What a subject returned: the values of one rank as blocks of full tensors, and those of all ranks merged.

Also the former place of `Shard`, for one release: it is `shardproof.Shard`.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from harness import shard as _shard

if not TYPE_CHECKING:  # which would find every name here

    def __getattr__(name: str) -> object:
        """The class `Shard`, with a DeprecationWarning that names its new place."""
        if name != "Shard":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        warnings.warn(f"{__name__}.Shard is now shardproof.Shard", DeprecationWarning, stacklevel=2)
        return _shard.Shard
