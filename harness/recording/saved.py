"""Saved activations: how many bytes autograd holds for backward on each rank, measured from outside.

Counts the storages that forward passes hand to autograd, each once while it is held, parameters left out; the peak is
what one rank must have room for beside its parameters. The hooks change no value: pack and unpack return the tensor.
Hooks that a program enters itself hide those around them: what they keep as a tensor is counted in them.
Unit: bytes. Source of the idea: torch.autograd.graph.saved_tensors_hooks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from harness.torch_internals.memory import storage_id


class _Held:
    """One saved tensor; the bytes of its storage count until the last holder is gone."""

    __slots__ = ("tensor", "_account", "_key")

    def __init__(self, tensor: Tensor, account: _Account) -> None:
        self.tensor = tensor
        self._account, self._key = account, account.hold(tensor)

    def __del__(self) -> None:
        self._account.release(self._key)


class _Account:
    """The storages that one rank holds now, by identity, with their number of holders; and the peak of their bytes."""

    def __init__(self) -> None:
        self._holders: dict[int, list[int]] = {}
        self._bytes = 0
        self.peak_bytes = 0

    def hold(self, tensor: Tensor) -> int:
        key = storage_id(tensor)
        entry = self._holders.setdefault(key, [0, tensor.untyped_storage().nbytes()])
        if entry[0] == 0:
            self._bytes += entry[1]
            self.peak_bytes = max(self.peak_bytes, self._bytes)
        entry[0] += 1
        return key

    def release(self, key: int) -> None:
        entry = self._holders[key]
        entry[0] -= 1
        if entry[0] == 0:
            self._bytes -= entry[1]
            del self._holders[key]


class SavedActivations:
    """Watches every rank that enters `on_rank`; `peak_bytes(rank)` answers afterwards."""

    def __init__(self) -> None:
        self._accounts: dict[int, _Account] = {}
        self._of_thread: dict[int, _Account] = {}
        self._lock = threading.Lock()
        self._made = saved_tensors_hooks.__init__

    @contextmanager
    def on_rank(self, rank: int) -> Iterator[None]:
        """Count what this thread's forward passes save, until the body ends."""
        account = self._accounts[rank] = _Account()
        with self._lock:
            if not self._of_thread:
                saved_tensors_hooks.__init__ = self._counting()  # type: ignore[method-assign]
            self._of_thread[threading.get_ident()] = account
        try:
            with saved_tensors_hooks(_itself, _itself):
                yield
        finally:
            with self._lock:
                del self._of_thread[threading.get_ident()]
                if not self._of_thread:
                    saved_tensors_hooks.__init__ = self._made  # type: ignore[method-assign]

    def peak_bytes(self, rank: int) -> int:
        """The most bytes that autograd held at once on this rank; 0 for a rank that was not watched."""
        account = self._accounts.get(rank)
        return account.peak_bytes if account else 0

    def _counting(self) -> Callable[..., None]:
        """The way hooks are made, so that they count the tensors that they keep on a watched thread."""
        of_thread, made = self._of_thread, self._made

        def make(hooks: Any, pack_hook: Callable[[Tensor], Any], unpack_hook: Callable[[Any], Tensor]) -> None:
            def pack(tensor: Tensor) -> Any:
                kept = pack_hook(tensor)
                account = of_thread.get(threading.get_ident())
                # A leaf that wants a gradient is a parameter: it is there anyway.
                counts = isinstance(kept, Tensor) and not (kept.is_leaf and kept.requires_grad)
                return _Held(kept, account) if counts and account is not None else kept

            def unpack(saved: Any) -> Tensor:
                return unpack_hook(saved.tensor if isinstance(saved, _Held) else saved)

            made(hooks, pack, unpack)

        return make


def _itself(tensor: Tensor) -> Tensor:
    return tensor
