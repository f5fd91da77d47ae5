"""Formulas of rows: some default case tells every number of one from its neighbours and from a constant."""

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from shardproof.parallel.communication import expectation
from shardproof.parallel.subject import rows_of
from shardproof.reference.case.default_cases import default_cases

Names = Mapping[str, Any]
EQUAL = {
    "(slice_tokens + 1) // tp": "tp divides the tokens of a row, and one more makes no further part",
    "(slice_tokens + 1) // ranks": "so do the ranks that split them",
}
"""Neighbours that are the same number in every legal case, and why."""
SHARED = {"hidden", "heads"}
"""Sizes that all cases of the list share, so that others are told from them: a constant could be one."""
Met = dict[tuple[str, str], list[Names]]
"""A formula and what its calls are for -> the values of its names, of every place of every case."""


@pytest.fixture(scope="module")
def met() -> Met:
    found: Met = defaultdict(list)
    with pytest.MonkeyPatch.context() as patch:
        right = expectation._term

        def term(row: Any, phase: str, place: Any, names: Any) -> Any:
            for formula in (row.elements, row.times):
                _, own = expectation._compile(formula)
                values = {name: names._value(name) for name in own}
                if values not in found[formula, row.why]:
                    found[formula, row.why].append(values)
            return right(row, phase, place, names)

        patch.setattr(expectation, "_term", term)
        for case in default_cases():
            assert all(expectation.terms(case, rows_of(case)))
    return found


def neighbours(formula: str, first: Names) -> Iterator[str]:
    """The formula with one more, one fewer, or what it is in `first`, in the place of every number."""
    for node in ast.walk(ast.parse(formula, mode="eval")):
        if isinstance(node, (ast.Name, ast.Constant)):
            own = formula[node.col_offset : node.end_col_offset]
            value = first[own] if isinstance(node, ast.Name) and own != "max" else getattr(node, "value", None)
            if type(value) is int:
                constant = [str(value)] if isinstance(node, ast.Name) and own not in SHARED else []
                others = (f"({own} + 1)", f"({own} - 1)", *constant)
                yield from (f"{formula[: node.col_offset]}{one}{formula[node.end_col_offset :]}" for one in others)


def value_of(formula: str, names: Names) -> Any:
    try:
        return eval(formula, {"__builtins__": {}}, {"max": max, **names})
    except ZeroDivisionError:
        return None


def unseen(met: Met) -> list[tuple[str, str, str]]:
    return [
        (why, formula, other)
        for (formula, why), places in met.items()
        for other in neighbours(formula, places[0])
        if not any(same in other for same in EQUAL)
        and all(value_of(other, names) == value_of(formula, names) for names in places)
    ]


@pytest.mark.deep("twelve CPU seconds: the closed forms of all default cases")
def test_a_default_case_tells_every_number_of_a_formula_from_its_neighbours(met: Met) -> None:
    assert unseen(met) == []
