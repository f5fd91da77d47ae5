"""Reads the table in a mode's docstring: the calls that it promises for a case. The grammar stands in parallel.schemes.

Written without a look at the closed forms, so that table, closed form and ledger are three accounts of one thing.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import product

from parallel.model.strategy import Strategy
from reference.case import Case
from reference.model.parameters import shapes

Line = tuple[str, str, str, str, int]
"""(phase, region, op, axis, payload bytes)."""

_ITEM = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of a table."""

    tensor: str
    conditions: tuple[str, ...]
    forward: tuple[str, ...]
    backward: tuple[str, ...]
    bytes: str


def rows(docstring: str) -> list[Row]:
    """The rows of the table, without its head."""
    cells = [[cell.strip() for cell in line.split("|")] for line in docstring.splitlines() if line.count("|") == 4]
    assert cells[0] == ["tensor", "layout", "forward", "backward", "bytes"]
    found = []
    for tensor, _, forward, backward, payload in cells[1:]:
        words = tensor.split()
        name = " ".join(words[:2]) if words[0] == "step" else words[0]
        conditions = tuple(word for word in words if "=" in word)
        found.append(
            Row(tensor=name, conditions=conditions, forward=_ops(forward), backward=_ops(backward), bytes=payload)
        )
    return found


def promised(docstring: str, case: Case, mode: Strategy) -> Counter[Line]:
    """Every call of a whole run that the table promises one rank, data apart."""
    found: Counter[Line] = Counter()
    modules = _modules(case)
    for row in rows(docstring):
        if not all(_holds(case, condition) for condition in row.conditions):
            continue
        if row.tensor.startswith("step "):
            axis = row.tensor.split()[1]
            for size in _each_partial(case, mode) if row.bytes == "N" else [_bytes(row.bytes, case, mode)]:
                for op in row.backward:
                    found[("grad_sync", "", op, axis, size)] += case.steps
            continue
        size = _bytes(row.bytes, case, mode)
        for region in [""] if row.tensor == "loss" else _matching(row.tensor, modules):
            phases = {"loss" if row.tensor == "loss" else "forward": row.forward, "backward": row.backward}
            if case.recompute == "full" and region.startswith("layers."):
                phases["recompute"] = row.forward
            for phase, ops in phases.items():
                for op in ops:
                    found[(phase, region, op, "tp", size)] += case.steps * case.micro
    return Counter({line: calls for line, calls in found.items() if len(case.axes[line[3]][0]) > 1})


def _ops(cell: str) -> tuple[str, ...]:
    if cell == "-":
        return ()
    ops: list[str] = []
    for part in cell.split(","):
        count, _, op = part.strip().rpartition(" ")
        ops += [op] * int(count or 1)
    return tuple(ops)


def _holds(case: Case, condition: str) -> bool:
    key, _, value = condition.partition("=")
    return str(getattr(case, key)).lower() == value


def _modules(case: Case) -> list[str]:
    """Every module that holds a parameter, and the head even when it is tied."""
    named = [name.rpartition(".")[0] for name in shapes(case)]
    named = ["embedding" if name.startswith("embedding.") else name for name in named]
    return list(dict.fromkeys([*named, "head"]))


def _matching(pattern: str, modules: list[str]) -> list[str]:
    choices = [part[1:-1].split(",") if part[:1] == "{" else [part] for part in re.split(r"(\{[^}]*\})", pattern)]
    patterns = ["".join(chosen) for chosen in product(*choices)]
    return [module for module in modules if any(fnmatchcase(module, p) for p in patterns)]


def _each_partial(case: Case, mode: Strategy) -> list[int]:
    """Bytes of every gradient that is a partial sum."""
    places = mode.placements(case)
    return [math.prod(place.shape) * _ITEM[case.dtype] for name, place in places.items() if mode.partial(case, name)]


def _bytes(text: str, case: Case, mode: Strategy) -> int:
    item, one = _ITEM[case.dtype], 8 if case.dtype == "float64" else 4
    count, _, letter = text.rpartition("*")
    places = mode.placements(case)
    split = {name for name, place in places.items() if place.cuts}
    padding = (case.padded_vocab - case.vocab) * case.hidden
    tables = ("embedding.tokens.weight", "head.weight") if case.embedding == "vocab" else ("head.weight",)
    padded = padding * sum(any(cut.blocks for cut in places[name].cuts) for name in tables if name in places)
    total = sum(math.prod(places[name].shape) for name in split) + padded
    whole = sum(math.prod(place.shape) for name, place in places.items() if name not in split)
    letters = {
        "A": case.tokens * case.hidden * item,
        "T": case.tokens * one,
        "V": case.tokens * case.padded_vocab * item,
        "G": (total // case.tp + whole) * item,
        "P": sum(_each_partial(case, mode)),
        "W": one,
        "v": case.tokens * case.vocab * item,
        "U": case.tokens * -(-case.vocab // case.tp) * case.tp * item,
        "K": case.vocab * case.hidden * item,
    }
    return int(count or 1) * (letters[letter] if letter in letters else int(letter))
