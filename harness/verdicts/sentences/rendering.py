"""The sentence of a fact: id -> a template of the fact's values, or a function of them.

A template is one of `str.format`, with these formats beside Python's own:

    {names:list}    "a, b and 3 more": the first five
    {names:all}     "a, b"
    {ranks:ranks}   "0 1 4-9"
    {lists:lists}   "[0, 1] [2, 3]": rank lists, each once and at most four
    {calls:call|calls}  the first for one, the second for more: of a number or of a list
    {factor:times}  "0.3333 x", with the digits in which it differs from 1
    {how:fact}      the sentence of a fact that is a value of this one

`facts.Fact` is not made without its sentence, so none lacks a value.
"""

from collections.abc import Callable, Mapping
from string import Formatter
from typing import Any

from shardproof.harness.errors import ranks_text
from shardproof.harness.verdicts.sentences.causes import FROM_CAUSES
from shardproof.harness.verdicts.sentences.checks import FROM_CHECKS
from shardproof.harness.verdicts.sentences.formats import describe_factor, join_lists, join_names
from shardproof.harness.verdicts.sentences.launches import FROM_LAUNCHES

SENTENCES: Mapping[str, str | Callable[..., str]] = {**FROM_CHECKS, **FROM_CAUSES, **FROM_LAUNCHES}


class _Formats(Formatter):
    """The formats of templates."""

    def format_field(self, value: Any, format_spec: str) -> str:
        """A value in this format."""
        if format_spec == "list":
            return join_names(value)
        if format_spec == "all":
            return ", ".join(map(str, value))
        if format_spec == "ranks":
            return ranks_text(value)
        if format_spec == "lists":
            return join_lists(value)
        if format_spec == "times":
            return describe_factor(value)
        if format_spec == "fact":
            return sentence_of(value["id"], value["values"])
        if "|" in format_spec:
            one, more = format_spec.split("|")
            return one if (value if isinstance(value, int) else len(value)) == 1 else more
        return str(super().format_field(value, format_spec))


_FORMATS = _Formats()
_WRONG = (LookupError, TypeError, ValueError, AttributeError, OverflowError)
"""Errors of a sentence whose values are not what it takes."""


def sentence_of(id: str, values: Mapping[str, Any]) -> str:
    """The sentence of a fact. Raises ValueError where none has the id, or it has other values than these."""
    try:
        template = SENTENCES[id]
        return template(**values) if callable(template) else _FORMATS.vformat(template, (), values)
    except _WRONG as problem:
        rule = f"has a sentence that cannot take these values ({problem!r})" if id in SENTENCES else "has no sentence"
        raise ValueError(f"fact id={id}: {rule}; legal: an id and values of harness/verdicts/sentences") from problem
