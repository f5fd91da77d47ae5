"""The modules of a case by their role, under the canonical names that the reference, the ledger and outcomes share.

column  wqkv (or wq, wk, wv), w1, w3, w13      output features belong to heads or inner features
        wuq, wukv                              the same, of latents
        eh_proj                                output features are hidden ones
row     wo, w2                                 input features belong to heads or inner features
norm    attention_norm, mlp_norm, final_norm; q_norm, k_norm act on heads
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from shardproof.parallel.communication.expectation import CallPlace, Places, in_modules
from shardproof.reference.case import Case
from shardproof.reference.model.parameters import shapes

_COLUMNS = frozenset({"wqkv", "wq", "wk", "wv", "wuq", "wukv", "eh_proj", "w1", "w3", "w13"})
_ROWS = frozenset({"wo", "w2"})


def is_column(module: str) -> bool:
    """Whether the module of this dotted name is a column linear."""
    return module.rpartition(".")[2] in _COLUMNS


def is_row(module: str) -> bool:
    """Whether the module of this dotted name is a row linear."""
    return module.rpartition(".")[2] in _ROWS


def attention_linears(case: Case) -> tuple[str, ...]:
    """The linears of one attention, in forward order."""
    return ("wqkv", "wo") if case.fuse_qkv else ("wq", "wk", "wv", "wo")


def mlp_linears(case: Case) -> tuple[str, ...]:
    """The linears of one MLP, in forward order."""
    if case.fuse_mlp:
        return ("w13", "w2")
    return ("w1", "w3", "w2") if case.activation == "swiglu" else ("w1", "w2")


def head_norms(case: Case) -> tuple[str, ...]:
    """The norms inside one attention: they act on every head by itself."""
    return ("q_norm", "k_norm") if case.qk_norm else ()


def linears(case: Case) -> list[str]:
    """Dotted names of all column and row linears, in forward order."""
    return [name for name in _modules(case) if is_column(name) or is_row(name)]


def column_linears(case: Case) -> list[str]:
    """Dotted names of all column linears, in forward order."""
    return [name for name in _modules(case) if is_column(name)]


def row_linears(case: Case) -> list[str]:
    """Dotted names of all row linears, in forward order."""
    return [name for name in _modules(case) if is_row(name)]


def _modules(case: Case) -> Iterator[str]:
    """Dotted names of all modules with a weight, in forward order."""
    return (name.removesuffix(".weight") for name in shapes(case) if name.endswith(".weight"))


def with_widths(named: Callable[[Case], Iterable[str]]) -> Places:
    """The places of linears by name, each with the `width` of its input."""

    def places(case: Case) -> Iterator[CallPlace]:
        for place in in_modules(named)(case):
            yield replace(place, values={"width": shapes(case)[f"{place.module}.weight"][1]})

    return places


COLUMN_LINEARS, ROW_LINEARS = with_widths(column_linears), in_modules(row_linears)
ATTENTION = in_modules(lambda case: [f"{block}.attention" for block in case.blocks])
"""Places of the rows of a closed form."""
