"""The text that cases read (`--data`), checked before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from harness.errors import RequestError
from harness.plain_case import PlainCase
from harness.protocols import CaseLike
from harness.resolve import resolve

FIRST_BATCH = "reference.data.batches:micro_batch"
DATA_STATUS = "reference.data.files:status"


def with_data(case: CaseLike, path: str) -> CaseLike:
    """The case with this text as its data. Raises RequestError where the case language has no such path."""
    try:
        return case.but(data=path)
    except ValueError as problem:
        raise RequestError(str(problem)) from problem


def check_data(path: str) -> None:
    """Raise RequestError for data that are not there; `read_first` reads them."""
    status: Callable[[Path], object] = resolve(DATA_STATUS)  # type: ignore[assignment]
    try:
        status(Path(path).expanduser())
    except (ValueError, RuntimeError) as problem:
        raise RequestError(f"data={path}: {problem}") from problem


def read_first(cases: Sequence[CaseLike]) -> None:
    """Read a first batch of every case: unreadable data are a wrong request and not a failure of the subject.

    Raises:
        RequestError: data that a case names cannot be read.
    """
    read: Callable[..., object] = resolve(FIRST_BATCH)  # type: ignore[assignment]
    for case in cases:
        if isinstance(case, PlainCase):
            continue
        try:
            read(case, 0, 0, 0)
        except (ValueError, OSError) as problem:
            word = "" if getattr(problem, "key", "") else f"data={getattr(case, 'data', '')}: "
            raise RequestError(f"{word}{problem}") from problem
