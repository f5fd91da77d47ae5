"""Reads files of planted bugs. The format is described in `bugs`."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from shardproof.bugs.references import references

FOLDER = Path(__file__).parent
Words = Mapping[str, int | float | bool | str]
"""Words of a case as values."""
_KEYS = frozenset("cases where modes fails alone in of as case system".split())
_TEXTS = frozenset({"equivalent", "wrong"})
_MODE = re.compile(r"([\w-]+)(?:\((.*?)\))?(?:\s+|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The one occurrence of `old` in the function `within` reads `new`; a qualified name, "" for the whole module."""

    module: str
    old: str
    new: str
    within: str = ""

    def __str__(self) -> str:
        return f"{self.module}:{self.within}" if self.within else self.module


@dataclass(frozen=True, slots=True, kw_only=True)
class Bug:
    """A planted bug.

    stands_for  the real bug: its row in the catalogue of bugs (B-..) or its source, and the system
    modes       mode that can host it -> words that its cases need there
    condition   words that its cases need in every mode
    suite       words that the property fixes whose cases show it (none for most: any property with the check `kills`)
    kills       the check that must kill it, in every mode; "run" when it ends the run
    alone       no other check may fail: this bug shows that `kills` is needed
    phase       of the first place where it goes wrong; several possible ones are separated by "|"
    region      module of that place, with * and ? as in file names, "|" as above; "" is no module
    cause       ids that are right to report (harness.diagnosing.causes.cause), "|" as above; "" when all would mislead
    equivalent  why no outcome and no ledger of any legal case can differ, for a bug that cannot be killed
    held_back   kept from authors of rules of diagnosis
    wrong       what is wrong, in one sentence
    case        a case that shows it
    system      "module:object" of the subject that has it, "" for our own
    """

    name: str
    stands_for: str
    modes: Mapping[str, str] = field(default_factory=dict)
    changes: tuple[Change, ...] = ()
    condition: str = ""
    suite: Words = field(default_factory=dict)
    kills: str = ""
    alone: bool = False
    phase: str = ""
    region: str = ""
    cause: str = ""
    equivalent: str = ""
    held_back: bool = False
    wrong: str = ""
    case: str = ""
    system: str = ""

    @property
    def references(self) -> tuple[str, ...]:
        """The public issues and pull requests that it is, as REPOSITORY#N."""
        return references(self.stands_for)


B = TypeVar("B", bound=Bug)


def files(folder: str) -> list[Path]:
    """The files of bugs of one folder, by name."""
    return sorted((FOLDER / folder).glob("*.txt"))


def read_bugs(path: Path, kind: type[B], groups: Mapping[str, Sequence[str]]) -> tuple[B, ...]:
    """The bugs of a file. `groups`: name -> modes; "every" are those of a bug that states none.

    Raises ValueError for a line that cannot be read.
    """
    return tuple(_bug(path, name, fields, kind, groups) for name, fields in records(path))


def records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and stated fields of each bug of a file, defaults included. Raises ValueError as `read` does."""
    names: dict[str, str] = {}
    defaults: dict[str, Any] = {}
    fields: dict[str, Any] = {}
    name = ""
    for number, line in _logical(path):
        if not line.startswith(" "):
            if name:
                yield name, {**defaults, **fields}
            name, fields = "", {}
            head, _, text = line.partition(" ")
            if head == "let":
                key, _, value = text.partition(" = ")
                names[key] = _expand_names(value, names)
            elif line == "defaults":
                fields = defaults = {}
            elif head.endswith(":") and text:
                name, fields["stands_for"] = head[:-1], text
            else:
                raise ValueError(f"{path.name}:{number}: {line!r}: begins no record; legal: NAME: what it stands for")
        elif not _field(fields, line.removeprefix("  "), names):
            raise ValueError(f"{path.name}:{number}: {line!r}: cannot be read; legal: {' '.join(sorted(_KEYS))} at - +")
    if name:
        yield name, {**defaults, **fields}


def _logical(path: Path) -> Iterator[tuple[int, str]]:
    """Number and text of each line, continued ones joined; without blank lines and comments."""
    pending, first = "", 0
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("    "):
            pending += " " + line.strip()
        elif line.strip() and not line.startswith("#"):
            if pending:
                yield first, pending
            pending, first = line.rstrip(), number
    if pending:
        yield first, pending


def _expand_names(text: str, names: Mapping[str, str]) -> str:
    """Words in which the names of a file stand for what they mean."""
    return " ".join(names.get(word, word) for word in text.split())


def _field(fields: dict[str, Any], line: str, names: Mapping[str, str]) -> bool:
    """Add what one line says. Whether it can be read."""
    head, _, text = line.partition(" ")
    if head == "at":
        fields.setdefault("changes", []).append((text, [], []))
    elif head in {"-", "+"} and fields.get("changes"):
        place, old, new = fields["changes"][-1]
        if head == "-" and new:  # a further change of the same function
            old, new = [], []
            fields["changes"].append((place, old, new))
        before, arrow, after = text.partition("  ->") if head == "-" else (text, "", "")
        (old if head == "-" else new).append(before)
        if arrow:
            new.append(after.strip())
    elif head in _TEXTS:
        fields[head] = text
    elif head in _KEYS:
        key = ""
        for word in _expand_names(line, names).split():
            if word == "|":
                continue
            if word in _KEYS:
                key = word
                fields[key] = []
            else:
                fields[key] += [word] if word != "-" else []
    else:
        return False
    return True


def _bug(path: Path, name: str, fields: dict[str, Any], kind: type[B], groups: Mapping[str, Sequence[str]]) -> B:
    def text(key: str) -> str:
        return " ".join(fields.get(key, ()))

    changes = []
    for place, old, new in fields.get("changes", ()):
        module, _, within = place.partition(":")
        changes.append(Change(module=module, within=within, old="\n".join(old), new="\n".join(new)))
    modes: dict[str, str] = {}
    for match in _MODE.finditer(text("modes") or "every"):
        modes |= dict.fromkeys(groups.get(match[1], (match[1],)), match[2] or "")
    return kind(
        name=name,
        stands_for=fields["stands_for"],
        modes=modes,
        changes=tuple(changes),
        condition=text("where"),
        suite={key: _value(value) for key, _, value in (word.partition("=") for word in fields.get("cases", ()))},
        kills=text("fails"),
        alone="alone" in fields,
        phase=_alternatives(text("in")),
        region=_alternatives(text("of")),
        cause="" if text("as") == "none" else text("as"),
        equivalent=fields.get("equivalent", ""),
        held_back="held_back" in path.parts,
        wrong=fields.get("wrong", ""),
        case=text("case"),
        system=text("system"),
    )


def _alternatives(text: str) -> str:
    """Alternatives in which "-" is the empty one."""
    return "|".join("" if part == "-" else part for part in text.split("|"))


def _value(text: str) -> int | float | bool | str:
    if text in {"true", "false"}:
        return text == "true"
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text
