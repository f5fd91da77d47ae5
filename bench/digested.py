"""The built-in subject, with a digest of every outcome it returns; see `bench.same_results`.

The only module of ours that is imported is `parallel.subject`, so that the same file runs on any commit.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
import torch.distributed as dist

from shardproof.parallel.subject import subject as ours


class Digested:
    """Our subject; each call appends one JSON line (case, rank, digest) to the file that DIGESTS names."""

    def __call__(self, case: Any, device: torch.device) -> Mapping[str, Any]:
        """The outcome of our subject, unchanged."""
        outcome = ours(case, device)
        line = json.dumps([str(case), dist.get_rank(), digest(outcome)])
        with open(os.environ["DIGESTS"], "a") as written:
            written.write(line + "\n")
        return outcome

    def __getattr__(self, name: str) -> Any:
        """An attribute of our subject: modes, expectations, layouts."""
        return getattr(ours, name)


def digest(outcome: Mapping[str, Any]) -> str:
    """SHA-256 of every name and of every bit of its value."""
    state = hashlib.sha256()
    _add(state, outcome)
    return state.hexdigest()


def _add(state: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        whole = value.detach().cpu().contiguous()
        state.update(f"{whole.dtype} {tuple(whole.shape)}".encode())
        state.update(whole.reshape(-1).view(torch.uint8).numpy().tobytes())
    elif is_dataclass(value):
        _add(state, [getattr(value, field.name) for field in fields(value)])
    elif isinstance(value, Mapping):
        _add(state, [part for key in sorted(value) for part in (str(key), value[key])])
    elif isinstance(value, list | tuple):
        for each in value:
            _add(state, each)
    else:
        state.update(repr(value).encode())


subject = Digested()
