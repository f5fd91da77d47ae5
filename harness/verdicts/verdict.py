"""The verdict of a check on a case, and its row in `verdicts.jsonl`: frozen dataclasses to JSON and back.

Values that are defaults are left out; "inf" and "nan" are text. A record may hold texts, numbers, tuples, mappings from
text, enums of text and other such records; its annotations are its schema. `Any` is a text, a number, a list or an
object of these.
"""

import dataclasses
import math
import re
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from shardproof.harness.verdicts import words
from shardproof.harness.verdicts.facts import Counts, Fact, FailedCheck, Note, Worst

Record = TypeVar("Record")
_MOST = 2**63
_KINDS = {str: "string", int: "integer", float: "number", bool: "boolean"}


def row_of(record: Any) -> dict[str, Any]:
    """The fields of a record as JSON can hold them, without those that are defaults."""
    return {
        field.name: plain(value)
        for field in dataclasses.fields(record)
        if field.init and (value := getattr(record, field.name)) != default_of(field)
    }


def default_of(field: "dataclasses.Field[Any]") -> object:
    """The default of a field, MISSING if it has none."""
    made = field.default_factory
    return field.default if made is dataclasses.MISSING else made()


def plain(value: Any) -> Any:
    """A value as JSON can hold it: numbers that JSON does not have become text."""
    if dataclasses.is_dataclass(value):
        return row_of(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, StrEnum):
        return value.value
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def record_of(kind: type[Record], row: object) -> Record:
    """The record of a row; unknown keys are ignored. Raises ValueError naming an invalid field."""
    if not isinstance(row, Mapping):
        raise ValueError(f"{kind.__name__}={row!r}: must be an object")
    hints = _hints(kind)
    found = {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]  # every kind is a dataclass
        if field.init and field.name in row:
            try:
                found[field.name] = _read_value(hints[field.name], row[field.name])
            except (ValueError, OverflowError) as problem:  # an integer may be too large for a float
                raise ValueError(f"{field.name}: {problem}") from problem
        elif field.init and default_of(field) is dataclasses.MISSING:
            raise ValueError(f"{field.name}: is missing in a {kind.__name__}")
    return kind(**found)


def schema_of(kind: Any) -> dict[str, Any]:
    """The JSON schema of a record, from its annotations."""
    hints = _hints(kind)
    fields = [field for field in dataclasses.fields(kind) if field.init]
    return {
        "type": "object",
        "properties": {field.name: _schema(hints[field.name]) for field in fields},
        "required": [field.name for field in fields if default_of(field) is dataclasses.MISSING],
    }


_hints: Callable[[Any], dict[str, Any]] = cache(get_type_hints)
"""The annotations of a record, evaluated once."""


def _read_value(hint: Any, value: Any) -> Any:
    """A value from JSON as this annotation demands. Raises ValueError if it is of another kind."""
    if hint is Any:
        return _read_any(value)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return None if value is None else _read_value(arguments[0], value)
    if origin is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{value!r} must be a list")
        if arguments[-1] is Ellipsis:
            return tuple(_read_value(arguments[0], entry) for entry in value)
        if len(value) != len(arguments):
            raise ValueError(f"{value!r} must have {len(arguments)} entries")
        return tuple(_read_value(one, entry) for one, entry in zip(arguments, value, strict=True))
    if origin is not None:  # a mapping from text
        if not isinstance(value, Mapping):
            raise ValueError(f"{value!r} must be an object")
        return {str(key): _read_value(arguments[1], entry) for key, entry in value.items()}
    if dataclasses.is_dataclass(hint):
        return record_of(hint, value)  # type: ignore[arg-type]  # a class, as every annotation is
    if issubclass(hint, StrEnum):
        return hint(value)
    return _simple(hint, value)


def _read_any(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _read_any(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_read_any(entry) for entry in value]
    if value in ("inf", "-inf", "nan"):
        return float(value)
    return None if value is None else _simple(type(value), value)


def _simple(hint: Any, value: Any) -> Any:
    """A text, number or truth value. Raises ValueError for any other."""
    if hint is float and isinstance(value, str) and value in ("inf", "-inf", "nan"):
        return float(value)
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if hint is int and isinstance(value, int) and abs(value) >= _MOST:
        raise ValueError(f"{value} must be an integer of 64 bits")
    if hint is str and isinstance(value, str):  # JSON can express half of a surrogate pair, but files cannot hold it
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, hint) and isinstance(value, bool) == (hint is bool):
        return value
    raise ValueError(f"{value!r} must be of the kind {_KINDS[hint]}")


def _schema(hint: Any) -> dict[str, Any]:
    if hint is Any:
        return {}
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return {"anyOf": [_schema(arguments[0]), {"type": "null"}]}
    if origin is tuple and arguments[-1] is Ellipsis:
        return {"type": "array", "items": _schema(arguments[0])}
    if origin is tuple:
        return {"type": "array", "prefixItems": [_schema(one) for one in arguments]}
    if origin is not None:
        return {"type": "object", "additionalProperties": _schema(arguments[1])}
    if dataclasses.is_dataclass(hint):
        return schema_of(hint)
    if issubclass(hint, StrEnum):
        return {"enum": [one.value for one in hint]}
    if hint is float:
        return {"anyOf": [{"type": "number"}, {"enum": ["inf", "-inf", "nan"]}]}
    return {"type": _KINDS[hint]}


_NUMBER = re.compile(r"(?<![a-z])\d+")
PASS, FAIL, UNKNOWN, SKIP = "pass", "fail", "unknown", "skip"
"""`skip` is the verdict on a case that the subject does not claim; no check returns it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A check on one case. `case` is the text of the case, `check` the name of the check, `facts` what it found.

    `kind` is how calls differ ("missing"), or the class that the subject raised; "" for other checks.

    `worst` is the tensor or event closest to its limit, or furthest beyond it. `notes` are what the check left open,
    `decided` by kind of name ("grad"): how many tensors were found right or wrong, and of how many. `failure` explains
    a failed check.
    """

    case: str
    check: str
    verdict: str
    facts: tuple[Fact, ...]
    kind: str = ""
    worst: Worst | None = None
    notes: tuple[Note, ...] = ()
    decided: Mapping[str, Counts] = dataclasses.field(default_factory=dict)
    failure: FailedCheck | None = None

    @property
    def statement(self) -> str:
        """The facts in words."""
        return words.join_facts(self.facts)

    @property
    def site(self) -> str:
        """What failures of one bug have in common: phase and module of the first place, with layers as one; else the
        statement, without its numbers.
        """
        place = self.failure.place if self.failure else None
        return _NUMBER.sub("*", " of ".join(filter(None, place)) if place else f"{self.check}: {self.statement}")

    @property
    def lines(self) -> list[str]:
        """The verdict in words, as a report shows it."""
        return words.render(self.check, self.statement, self.worst, self.failure)

    @property
    def message(self) -> str:
        """The lines as one text."""
        return "\n".join(self.lines)

    def row(self) -> dict[str, Any]:
        """The verdict as an object of `verdicts.jsonl`: its fields, and its message for readers of text."""
        return {**row_of(self), "message": plain(self.message)}


def verdict_of(row: object) -> Verdict:
    """The verdict of a row. Raises ValueError naming an invalid field."""
    verdict = record_of(Verdict, row)
    if verdict.verdict not in (words := (PASS, FAIL, UNKNOWN, SKIP)):
        raise ValueError(f"verdict={verdict.verdict!r}: is none of its values; legal: {'|'.join(words)}")
    return verdict
