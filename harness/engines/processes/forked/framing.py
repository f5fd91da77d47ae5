"""Messages over a socket: a length, then bytes. The driver never blocks on the rest of a message that has begun."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

_LENGTH = struct.Struct("<Q")
_PART = 1 << 20


def send(sock: socket.socket, message: bytes) -> None:
    """Send one message. Raises OSError when the other end is closed, TimeoutError after the socket's own limit."""
    sock.sendall(_LENGTH.pack(len(message)))
    sock.sendall(message)


def receive(sock: socket.socket) -> bytearray:
    """Wait for one message. Raises EOFError when there will be none."""
    (length,) = _LENGTH.unpack(_exactly(sock, _LENGTH.size))
    return _exactly(sock, length)


class FramedSocket:
    """The receiving end of a socket that may go silent at any time; `ended` when the other end has closed."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.ended = False
        self._buffer = bytearray()

    def fileno(self) -> int:
        """For selectors."""
        return self.sock.fileno()

    def arrived(self) -> Iterator[bytearray]:
        """The messages that are complete; to be called when the socket is readable."""
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
