"""Known deviations of real systems from the right mathematics, read from `bugs/variants.txt`: which cases show each.

A variant is a word of the case (`variant=NAME`). The dense model ignores it: the truth stays the truth, so that a
subject that offers a variant must fail. `parallel.variants` plants it in our implementation.
"""

from collections.abc import Callable, Mapping
from typing import Any

from shardproof.bugs.record import FOLDER, Bug, read
from shardproof.reference.case.conditions import broken

VARIANTS: dict[str, Bug] = {bug.name: bug for bug in read(FOLDER / "variants.txt", Bug, {})}
"""Name -> the bug; `stands_for` is its source, `wrong` what deviates, `suite` words that make a case show it."""
_DERIVED: dict[str, tuple[str, Callable[[Mapping[str, Any]], int]]] = {
    "kv_group": ("rows of a kv group", lambda v: (v["heads"] // v["kv_heads"] + 2) * (v["hidden"] // v["heads"])),
    "edp": (
        "ranks that hold the same experts",
        lambda v: v["tp"] * v["cp"] * v["dp"] // (v["ep"] * (v["etp"] or v["tp"])),
    ),
    "table": ("elements of a rank's token table", lambda v: v["vocab"] // v["tp"] * v["hidden"]),
}
"""Number in a condition -> what it is, and its value."""


def lack(values: Mapping[str, Any]) -> str:
    """Words that a case of these values lacks to show its variant, "" when none."""
    variant = VARIANTS[values["variant"]]
    if values["mode"] not in variant.modes:
        return f"is a deviation of mode={'|'.join(variant.modes)}, not of mode={values['mode']}"

    def value(key: str) -> object:
        return _DERIVED[key][1](values) if key in _DERIVED else values[key]

    word = broken(variant.condition, value)
    derived = [f"{key} = {value(key)} {what}" for key, (what, _) in _DERIVED.items() if key in word]
    return word and "; ".join([f"shows with {word} only", *derived])


def words(name: str) -> dict[str, int | float | bool | str]:
    """The words that make a case of a mode that has this variant show it. Raises ValueError for an unknown name."""
    if name not in VARIANTS:
        raise ValueError(f"variant={name}: is not a known variant; legal: {' '.join(VARIANTS)}")
    return {**VARIANTS[name].suite, "variant": name}
