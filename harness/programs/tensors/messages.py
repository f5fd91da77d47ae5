"""Tells from which ranks a recorded program receives messages, and when it sends one (torch.distributed's isend, irecv,
and all that calls them).
"""

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from shardproof.harness.torch_internals.lookup import replace_function

SENT = -1
"""Stands for the rank from which a message comes where a rank sends one."""


def watch_messages(tell: Callable[[int], object]) -> None:
    """Have `tell` called with the global rank from which a message is about to be received, with SENT at a sending.

    A message from any source is not told. The functions are replaced in torch; a module that imported one before keeps
    the original.
    """
    if not dist.is_available():
        return
    for original in (dist.isend, dist.irecv):
        replace_function(original, _wrap_message(original, tell), "torch.distributed")


def _wrap_message(original: Any, tell: Callable[[int], object]) -> Any:
    @functools.wraps(original)
    def message(*args: Any, **words: Any) -> Any:
        if original.__name__ == "isend":
            tell(SENT)
        elif (source := _find_source(*args, **words)) is not None:
            tell(source)
        return original(*args, **words)

    return message


def _find_source(
    _tensor: Any, src: int | None = None, group: Any = None, _tag: int = 0, group_src: int | None = None, **_: Any
) -> int | None:
    """The global rank that irecv's arguments name, None for any source."""
    if src is not None or group_src is None:
        return src
    return group_src if group is None else dist.get_global_rank(group, group_src)
