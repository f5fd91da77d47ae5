"""A pipeline's timeline as text: one line a rank, one column a unit of time."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from parallel.schedules.pipeline import Kind, Pipeline, orders
from parallel.schedules.timing import ComputeTimes, Span, bubble, bubble_stated, timeline

__all__ = ["picture"]


def picture(pipeline: Pipeline, times: ComputeTimes | None = None) -> str:
    """The timeline of all ranks with its bubble; `F3` is the forward of micro-batch 3, `.` is waiting.

    A chunk but the first is marked by its number (`F3'1`). The column is the shortest computation.
    """
    spans = timeline(pipeline, orders(pipeline), times)
    unit = min(span.end - span.start for own in spans for span in own if span.end > span.start)
    width = max(len(_label(span)) for own in spans for span in own) + 1
    lines = [f"rank {rank} |{_line(own, unit, width)}".rstrip() for rank, own in enumerate(spans)]
    stated = bubble_stated(pipeline, times)
    known = f"closed form {stated}" if stated is not None else "no closed form"
    return "\n".join([*lines, f"bubble {bubble(spans)}, {known}"])


def _label(span: Span) -> str:
    chunk = f"'{span.action.chunk}" * bool(span.action.chunk)
    return f"{span.action.kind}{span.action.micro}{chunk}"


def _line(own: Sequence[Span], unit: Fraction, width: int) -> str:
    text, at = "", Fraction(0)
    for span in own:
        text += ".".ljust(width) * int((span.start - at) / unit)
        columns = int((span.end - span.start) / unit)
        text += _label(span).ljust(width) + ("-" if span.action.kind is Kind.F else "=").ljust(width) * (columns - 1)
        at = span.end
    return text
