"""How the numbers of a prediction are written: seconds with four digits, bytes as GiB, tables of a frame."""

import math
from collections.abc import Callable
from dataclasses import replace

import pandas as pd

from reports.predicting.prediction import figure
from reports.printing.text_tables import NOTHING, Table, count
from reports.printing.text_tables import table as printed


def seconds(value: object) -> str:
    """Seconds with four digits."""
    return NOTHING if _missing(value) else figure(float(str(value)), 4)


def gibibytes(value: object) -> str:
    """Bytes as GiB with three digits."""
    return NOTHING if _missing(value) else figure(float(str(value)) / 2**30)


def _missing(value: object) -> bool:
    return value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value))


def table(title: str, frame: pd.DataFrame, columns: dict[str, tuple[str, Callable[[object], str]]], note: str) -> Table:
    """A table of these columns (header -> column and how to write it); those that hold no words align right."""
    made = printed(title, frame, [(header, *column) for header, column in columns.items()], note)
    numbers = (seconds, gibibytes, count)
    return replace(made, numbers=frozenset(i for i, (_, write) in enumerate(columns.values()) if write in numbers))
