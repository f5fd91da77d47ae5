"""Messages over a socket: a length, then bytes. The supervisor never waits for the rest of a message that has begun.

A message is a pickle in which dense tensors on the CPU are their bytes: torch's own way of sending tensors between
processes leaves files in shared memory behind when a process is killed.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import socket
import struct
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

__all__ = ["Mailbox", "packed", "receive", "send", "unpacked"]

_LENGTH = struct.Struct("<Q")
_PART = 1 << 20


def packed(value: object) -> bytes:
    """A value as bytes. Raises what pickling raises."""
    stream = io.BytesIO()
    pickler = pickle.Pickler(stream, protocol=5)
    pickler.dispatch_table = copyreg.dispatch_table | {Tensor: _reduced}
    pickler.dump(value)
    return stream.getvalue()


def unpacked(message: bytes | bytearray) -> Any:
    """The value of these bytes. Raises what unpickling raises."""
    return pickle.loads(message)


def send(sock: socket.socket, message: bytes) -> None:
    """Send one message. Raises OSError when nobody can receive it, TimeoutError after the socket's own limit."""
    sock.sendall(_LENGTH.pack(len(message)))
    sock.sendall(message)


def receive(sock: socket.socket) -> bytearray:
    """Wait for one message. Raises EOFError when there will be none."""
    (length,) = _LENGTH.unpack(_exactly(sock, _LENGTH.size))
    return _exactly(sock, length)


class Mailbox:
    """The receiving end of a socket that may go silent at any time."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.ended = False
        self._buffer = bytearray()

    def fileno(self) -> int:
        """For selectors."""
        return self.sock.fileno()

    def arrived(self) -> Iterator[bytearray]:
        """The messages that are complete; to be called when the socket is readable. `ended` tells that it closed."""
        try:
            part = self.sock.recv(_PART)
        except OSError:
            part = b""
        self.ended = not part
        self._buffer += part
        while len(self._buffer) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._buffer)[0]
            if len(self._buffer) < end:
                return
            message = self._buffer[_LENGTH.size : end]
            del self._buffer[:end]
            yield message


def _exactly(sock: socket.socket, count: int) -> bytearray:
    buffer = bytearray(count)
    view = memoryview(buffer)
    while view:
        read = sock.recv_into(view)
        if not read:
            raise EOFError("the other end of the socket was closed")
        view = view[read:]
    return buffer


def _reduced(tensor: Tensor) -> Any:
    """A dense tensor as its bytes; any other as torch pickles it."""
    if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
        return tensor.__reduce_ex__(2)
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    data: Any = plain.view(torch.uint8).numpy() if plain.numel() else None
    buffer = pickle.PickleBuffer(data) if data is not None else b""
    return _rebuilt, (tensor.dtype, tuple(tensor.shape), buffer, tensor.requires_grad)


def _rebuilt(dtype: torch.dtype, shape: tuple[int, ...], data: Any, requires_grad: bool) -> Tensor:
    flat = torch.frombuffer(data, dtype=dtype) if len(data) else torch.empty(0, dtype=dtype)
    return flat.reshape(shape).requires_grad_(requires_grad)
