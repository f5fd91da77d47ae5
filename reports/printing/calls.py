"""The calls that a subject states for a case, as a table.

A line is a row of its closed form, with bytes as formula and number.
"""

import re
from collections.abc import Iterable

from shardproof.harness.protocols import TermLike
from shardproof.reports.printing.text_tables import NOTHING, Table, count

_HEADERS = ("module", "phase", "op", "axis", "bytes", "formula", "calls", "at", "why")


def calls_table(case: str, terms: Iterable[TermLike]) -> Table:
    """The terms of a case; those that differ in their module or their count alone are one line."""
    modules: dict[tuple[str, ...], dict[str, None]] = {}
    calls: dict[tuple[str, ...], int | None] = {}
    for term in terms:
        line = _line_of_term(term)
        modules.setdefault(line, {})[term.region or ""] = None
        known = calls.get(line, 0)
        calls[line] = None if known is None or term.calls is None else known + term.calls
    rows = tuple(
        (_pattern_of_modules(names), *line[:-2], count(calls[line]), *line[-2:]) for line, names in modules.items()
    )
    at = _HEADERS.index("at")
    kept = [place for place in range(len(_HEADERS)) if place != at or any(row[at] for row in rows)]
    return Table(
        title=f"Calls of {case}" if case else "Calls of the default case",
        headers=tuple(_HEADERS[place] for place in kept),
        rows=tuple(tuple(row[place] for place in kept) for row in rows),
        numbers=frozenset(kept.index(_HEADERS.index(name)) for name in ("bytes", "calls")),
        note="as stated, not measured; bytes: payload of one call, formula: dtype and elements of it, in words of the "
        "case; calls: of one rank, the whole run",
    )


def _line_of_term(term: TermLike) -> tuple[str, ...]:
    """Words about a term, its module and its count aside."""
    op = f"{term.op or NOTHING} {term.reduce_op if term.reduce_op not in ('sum', None) else ''}".strip()
    at = ", ".join(f"{axis} {place}" for axis, place in getattr(term, "at", {}).items())
    axis = term.axis if term.group_size is None else f"{term.axis or NOTHING}={term.group_size}"
    elements = getattr(term, "elements", "")
    formula = f"{term.dtype}[{elements}]" if elements else term.dtype
    words = (term.phase, op, axis, count(term.payload_bytes), formula, at, getattr(term, "why", ""))
    return tuple(NOTHING if value is None else str(value) for value in words)


def _pattern_of_modules(modules: Iterable[str]) -> str:
    """Dotted names as few patterns: "layers.*.attention.{wq,wk,wv}"."""
    leaves: dict[str, list[str]] = {}
    for name in dict.fromkeys(re.sub(r"\.\d+(?=\.|$)", ".*", module) for module in modules):
        above, _, leaf = name.rpartition(".")
        leaves.setdefault(above, []).append(leaf)
    sets = {above: f"{{{','.join(names)}}}" if len(names) > 1 else names[0] for above, names in leaves.items()}
    return ", ".join(f"{above}.{leaf}" if above else leaf for above, leaf in sets.items()) or NOTHING
