"""The decoder over several axes, with one rank that ends badly after some calls of modules.

Every ending is a subject with a name of its own, by which `harness.running.ranks.execution` finds it in processes.
"""

import os
import signal
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardproof.parallel.subject import subject as decoder

FORWARDS = 30
"""Calls of modules on a rank before it ends: in the first step of the smallest case."""


def end(kind: str) -> None:
    """End this rank in one way."""
    if kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "raises":
        raise ValueError("bad layer")
    elif kind == "exits":
        os._exit(0)
    elif kind == "sleeps":
        time.sleep(3600)
    while kind == "loops":
        pass


class Ending:
    """The decoder whose last rank ends in a way; anything else is as the decoder's."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(decoder, name)

    def __call__(self, case: Any, device: torch.device) -> Mapping[str, Any]:
        calls = iter(range(FORWARDS))

        def count(_module: nn.Module, _arguments: Any) -> None:
            if next(calls, None) is None:
                end(self.kind)

        last = dist.get_rank() == dist.get_world_size() - 1
        hook = nn.modules.module.register_module_forward_pre_hook(count) if last else None
        try:
            return decoder(case, device)
        finally:
            if hook is not None:
                hook.remove()


killed, stopped, raises = Ending("killed"), Ending("stopped"), Ending("raises")
exits, sleeps, loops = Ending("exits"), Ending("sleeps"), Ending("loops")
