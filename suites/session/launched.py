"""A session whose processes torchrun has launched: that of rank 0 draws and checks, the others serve it and end with
it.
"""

from contextlib import suppress

import pytest

from shardproof.harness.engines.processes.launched.torchrun import dismiss_world, is_to_serve, serve_driver
from shardproof.harness.errors import ShardproofError


def serve_first_rank() -> int | None:
    """Serve rank 0's session to its end and return the exit status; None on rank 0. Raises UsageError."""
    try:
        return serve_driver() if is_to_serve() else None
    except ShardproofError as problem:
        raise pytest.UsageError(str(problem)) from problem


def dismiss_unused() -> None:
    """Release the ranks that the session of rank 0 has not used."""
    with suppress(ShardproofError):  # no launcher: the session has reported that already
        if not is_to_serve():
            dismiss_world()
