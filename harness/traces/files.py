"""Files of traces, which other programs wrote: their names, and fields with the types that they must have. No torch is
loaded.

A field of another type is a TypeError. Pickles hold plain values.
"""

import gzip
import io
import pickle
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardproof.harness.errors import RequestError, error_text

RANK = r"rank[-_.]?(\d+)"
"""Where the rank is in the name of a file, unless the user states it."""
REPORTS = (".nsys-rep", ".qdstrm")
SUFFIXES = (".json", ".json.gz", ".pickle", ".pkl", ".sqlite", *REPORTS)
"""Ends of the names of traces, by which they are found in a folder."""
_DUMP = re.compile(r"[^.]*rank_?\d+")
"""The name that the Flight Recorder gives its files, which has no suffix."""
LEGAL = "a trace of torch.profiler, a dump of NCCL's Flight Recorder, or a report of nsys"


def check_names(names: Iterable[str], rank_regex: str = RANK) -> None:
    """Raise RequestError for what is no file or folder of traces, or no pattern, before anything is read."""
    rank_pattern(rank_regex)
    for name in names:
        list(trace_files(Path(name)))


def rank_pattern(text: str) -> re.Pattern[str]:
    """The pattern of an option, whose group 1 is the rank. Raises RequestError for an invalid one."""
    try:
        pattern = re.compile(text)
    except re.error as problem:
        raise RequestError(f"rank-regex={text}: is no regular expression ({problem}); legal: {RANK}") from problem
    if pattern.groups < 1:
        raise RequestError(f"rank-regex={text}: has no group for the rank; legal: {RANK}")
    return pattern


def trace_files(path: Path) -> Iterator[Path]:
    """The file, or those in a folder that are named as traces are. Raises RequestError if there are none."""
    if path.is_dir():
        named = (one for one in path.iterdir() if one.name.endswith(SUFFIXES) or _DUMP.fullmatch(one.name))
        files = sorted(file for file in named if file.is_file())
        if not files:
            raise RequestError(f"trace {path}: the folder holds no {', '.join(SUFFIXES)}; legal: {LEGAL}")
        yield from files
    elif path.is_file():
        yield path
    else:
        raise RequestError(f"trace {path}: no such file or folder; legal: {LEGAL}")


@contextmanager
def refuse_torn(kind: str, path: Path, legal: str) -> Iterator[None]:
    """Raise RequestError, in one sentence, if the body cannot read a file. `kind` is "trace" or "dump"."""
    try:
        yield
    except RequestError:
        raise
    except (EOFError, gzip.BadGzipFile, zlib.error) as problem:
        reason = f"is packed and cut or broken ({error_text(problem)})"
        raise RequestError(f"{kind} {path}: {reason}; legal: {legal}") from problem
    except OSError as problem:
        reason = f"cannot be read ({problem.strerror or problem})"
        raise RequestError(f"{kind} {path}: {reason}; legal: {legal}") from problem
    except Exception as problem:  # nested without end, torn, fields of any type
        reason = f"is cut, or is no {kind} ({error_text(problem)})"
        raise RequestError(f"{kind} {path}: {reason}; legal: {legal}") from problem


_PLAIN = (
    "PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT SHORT_BINUNICODE BINUNICODE "
    "BINUNICODE8 EMPTY_LIST APPEND APPENDS EMPTY_DICT SETITEM SETITEMS EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 BINPUT "
    "LONG_BINPUT MEMOIZE BINGET LONG_BINGET"
)
"""The operations that make dicts, lists, tuples, texts and numbers: pickle, and torch's own pickler, need no others."""


class _Dispatch(dict[int, Any]):
    def __missing__(self, key: int) -> Any:
        raise pickle.UnpicklingError(f"operation {bytes([key])!r} makes more than plain values")


_InPython: Any = pickle._Unpickler
"""The unpickler in Python, since that in C takes memory for any index that a file states."""


class _Plain(_InPython):
    """Unpickles dicts with texts as keys, lists, tuples, texts and numbers, and nothing that has a class."""

    dispatch = _Dispatch(
        {code: _InPython.dispatch[code] for code in (getattr(pickle, name)[0] for name in _PLAIN.split())}
    )

    def load_setitem(self) -> None:
        _check_keys(self.stack[-2:-1])
        super().load_setitem()

    def load_setitems(self) -> None:
        _check_keys(self.stack[::2])
        super().load_setitems()

    dispatch[pickle.SETITEM[0]] = load_setitem
    dispatch[pickle.SETITEMS[0]] = load_setitems


def _check_keys(keys: Iterable[Any]) -> None:
    # Hashing tuples that contain each other twice takes 2**depth steps, and 100 bytes can cause that.
    for key in keys:
        text(key)


def unpickle(content: bytes) -> dict[str, Any]:
    """The dict of plain values in a pickle. Raises TypeError or UnpicklingError for one that holds anything else, and
    any exception for one that is torn.
    """
    try:
        found = _Plain(io.BytesIO(content)).load()
    except EOFError as problem:
        raise pickle.UnpicklingError("it ends in the middle of a pickle") from problem
    if not isinstance(found, dict):
        raise TypeError("it must hold one dict")
    return found


def number(value: Any) -> int:
    """A whole number that fits in 64 bits. Raises TypeError for another value."""
    if type(value) is not int or abs(value) >= 2**63:
        raise TypeError(f"a {type(value).__name__} where a whole number must be")
    return value


def text(value: Any) -> str:
    """A text. Raises TypeError for another value."""
    if not isinstance(value, str):
        raise TypeError(f"a {type(value).__name__} where a text must be")
    return value


def as_list(value: Any) -> list[Any] | tuple[Any, ...]:
    """A list of anything. Raises TypeError for another value."""
    if not isinstance(value, list | tuple):
        raise TypeError(f"a {type(value).__name__} where a list must be")
    return value


def numbers(value: Any) -> tuple[int, ...]:
    """A list of whole numbers. Raises TypeError for another value."""
    return tuple(map(number, as_list(value)))
