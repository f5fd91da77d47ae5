"""Streams the events of a Chrome trace: a file of any size takes the memory of a few chunks.

The profiler begins every event with the key `ph`. The text from the brace that ends an event to that key in the next
cannot occur within a JSON string, where quotes are escaped. So the file is cut there without being parsed. An event
that is not wanted is skipped after a look at its category and name. json parses the others, and all events of a file
whose events begin with another key.
"""

import codecs
import gzip
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, cast

from shardproof.harness.traces.files import refuse_torn

_CHUNK_BYTES = 2**22
_MOST_BYTES = 2**26
"""The most bytes of a header or an event."""
_MOST_KNOWN = 100_000
"""The most texts of categories and names that are kept."""
_MOST_JOINED = 1000
"""The most pieces in a row without an event."""
_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_BETWEEN = re.compile(rb'\}\s*,\s*(\{\s*"ph"\s*:)')
_ABOUT = re.compile(rb'\s*"(.)"\s*,\s*"cat"\s*:\s*"([^"\\]*)"\s*,\s*"name"\s*:\s*"((?:[^"\\]|\\.)*)"')
"""Phase, category and name of an event, after its first key."""
_CATEGORY = re.compile(rb'"cat"\s*:\s*"([^"\\]*)"')
"""The category of an event that has it later, as flows have."""
_HOLE = re.compile(r'("Process Group Description"\s*:)(?=\s*[,}])')
"""A group without a description: some versions of torch write nothing there, which is no JSON."""
_SPACE = re.compile(r"[ \t\r\n]*")
LEGAL = "what torch.profiler's export_chrome_trace wrote, .json or .json.gz"
Json = dict[str, Any]


class TraceEvents:
    """The events of a file, at least those for which `wants(category, name)` is true: all events of a small file, and
    of a file whose events do not begin with `ph`. `name` is empty for events that have it elsewhere than usual.

    `header` holds the other entries of the file, all of them once the events have been read. Reading raises
    RequestError for a file that cannot be read, is cut, or is no trace.
    """

    def __init__(self, path: Path, wants: Callable[[bytes, bytes], bool]) -> None:
        self.header: Json = {}
        self._path, self._wants = path, wants
        self._decoder = json.JSONDecoder(strict=False)
        self._known: dict[bytes, bool] = {}

    def __iter__(self) -> Iterator[Json]:
        with refuse_torn("trace", self._path, LEGAL), open_trace(self._path) as file:
            rest = self._read_head(file)
            while not (found := _BETWEEN.search(rest)) and len(rest) < _CHUNK_BYTES:
                if not (chunk := file.read(_CHUNK_BYTES)):
                    break
                rest += chunk
            if found is None or not rest.lstrip().startswith(b"{"):
                yield from self._read_one_by_one(rest, file)
            else:
                yield from self._read_wanted(rest, file, found[0], found[1])

    def _read_head(self, file: IO[bytes]) -> bytes:
        """Put the entries before the events into the header. Returns what follows."""
        head = b""
        while not (found := _EVENTS.search(head)):
            if head.lstrip()[:1] == b"[":  # a list of events alone
                return head.lstrip()[1:]
            chunk = file.read(_CHUNK_BYTES)
            if not chunk or len(head) > _MOST_BYTES:
                raise ValueError("there are no traceEvents in it")
            head += chunk
        before = head[: found.start()].rstrip().removesuffix(b",")
        self.header |= json.loads(before + b"}", strict=False)
        return head[found.end() :]

    def _read_wanted(self, rest: bytes, file: IO[bytes], between: bytes, start: bytes) -> Iterator[Json]:
        """The wanted events among the pieces into which `between` cuts the file; all but the first lack `start`."""
        piece, begin, joined = b"", b"", 0
        rest = rest.lstrip()
        while chunk := file.read(_CHUNK_BYTES):
            *pieces, rest = (rest + chunk).split(between)
            for one in pieces:
                piece = piece + between + one if piece else one
                if begin and not self._is_wanted(piece):
                    piece = b""
                    continue
                try:
                    events = self._decode_all(begin + piece + b"}")
                except ValueError:  # a list of objects inside of an event was cut
                    joined += 1
                    if joined > _MOST_JOINED:
                        raise
                    continue
                piece, begin, joined = b"", start, 0
                yield from events
            if len(rest) > 2 * _CHUNK_BYTES:  # events that begin with another key
                break
        yield from self._read_one_by_one(begin + (piece + between if piece else b"") + rest, file)

    def _is_wanted(self, piece: bytes) -> bool:
        """Whether an event is wanted, by its text from phase to name, which many have in common."""
        about = piece[: piece.find(b'"pid"')]
        if (known := self._known.get(about)) is None:
            if found := _ABOUT.match(about):
                known = self._wants(found[2], found[3])
                if len(self._known) < _MOST_KNOWN:
                    self._known[about] = known
            else:
                category = _CATEGORY.search(piece)
                known = category is None or self._wants(category[1], b"")
        return known or b'"ph"' in piece  # several events

    def _decode_all(self, text: bytes) -> list[Json]:
        """The events in a text, several if some begin with another key."""
        decoded, at, found = _fill_holes(text.decode()), 0, []
        while at < len(decoded):
            event, at = self._decoder.raw_decode(decoded, at)
            found.append(_check_event(event))
            at = _skip_space(decoded, at)
            if at < len(decoded) and decoded[at] != ",":
                raise ValueError("there is no comma between two events")
            at = _skip_space(decoded, at + 1)
        return found

    def _read_one_by_one(self, rest: bytes, file: IO[bytes]) -> Iterator[Json]:
        """Read event by event up to the end of the list, and the entries behind it into the header."""
        utf8 = codecs.getincrementaldecoder("utf-8")()
        text, at = _fill_holes(utf8.decode(rest)), 0
        while True:
            at = _skip_space(text, at)
            if text[at : at + 1] == "]":
                break
            try:
                event, end = self._decoder.raw_decode(text, at)
                end = _skip_space(text, end)
                if text[end : end + 1] not in (",", "]"):
                    raise ValueError("it ends in the middle of its events")
            except ValueError:
                chunk = file.read(_CHUNK_BYTES)
                if not chunk or len(text) - at > _MOST_BYTES:
                    raise
                text, at = _fill_holes(text[at:] + utf8.decode(chunk)), 0
                continue
            yield _check_event(event)
            at = end + (text[end] == ",")
        behind = (text[at + 1 :] + utf8.decode(file.read(_MOST_BYTES))).strip()
        if behind not in ("", "}"):
            self.header |= json.loads("{" + behind.removeprefix(","), strict=False)


def _fill_holes(text: str) -> str:
    return _HOLE.sub(r'\1 ""', text) if "Process Group Description" in text else text


def _check_event(event: Any) -> Json:
    if not isinstance(event, dict):
        raise TypeError(f"an event in it is {type(event).__name__}, and must be an object")
    return event


def _skip_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


def open_trace(path: Path) -> IO[bytes]:
    """The file, decompressed if it begins as gzip files do."""
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    return cast(IO[bytes], gzip.open(path)) if packed else path.open("rb")
