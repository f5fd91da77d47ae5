"""Reasons behind an exception of the subject: the innermost exception that led to it, a package that is missing."""

from shardproof.harness.engines.calls.callers import raised_at
from shardproof.harness.errors import error_text, install_text


def behind(error: BaseException) -> str:
    """A clause for the message of an exception that a rank raised, "" where nothing stands behind it.

    "; its cause is ValueError: 4 entries for 2 parameters, at buckets.py:7 in fill" where it was raised from others.
    """
    inner = _innermost(error)
    place = raised_at(inner.__traceback__)
    cause = "" if inner is error else f"; its cause is {error_text(inner)}" + (f", at {place}" if place else "")
    advice = install_text(inner)
    return cause + (f"; {advice}" if advice else "")


def _innermost(error: BaseException) -> BaseException:
    """The first of the exceptions that led to this one, as Python prints them: those it hides are left out."""
    seen = {id(error)}
    while True:
        before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if before is None or id(before) in seen:
            return error
        seen.add(id(before))
        error = before
