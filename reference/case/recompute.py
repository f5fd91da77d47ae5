"""What makes the words of recomputation legal: `recompute_method recompute_layers distribute_saved early_stop`.

They are forms of recompute=full. Sources: Megatron-Core 0.16.1 `TransformerConfig`, which refuses to distribute inputs
that are split already, and whose uniform method fails on layers that are no whole number of units (around.md 16).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from reference.case.modes import mode_of, whose
from reference.errors import CaseError
from reference.groups import PipelineGroup

__all__ = ["METHODS", "WORDS", "problems"]

METHODS = ("uniform", "block")
WORDS: Mapping[str, Any] = {
    "recompute_method": "uniform",
    "recompute_layers": 1,
    "distribute_saved": False,
    "early_stop": False,
}
"""Each word with its default: every layer alone, its whole input saved, computed again to its end."""


def problems(v: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Key, the rule that it breaks and a legal value, of every broken rule."""
    mode, name, size = mode_of(v), v["mode"], v["recompute_layers"]
    for key, plain in WORDS.items() if v["recompute"] != "full" else ():
        if v[key] != plain:
            legal = f"{key}={str(plain).lower()}"
            yield key, f"is a form of recompute=full, and recompute={v['recompute']} computes no layer again", legal
    if size < 1:
        yield "recompute_layers", "must be at least 1", "recompute_layers=1"
    elif v["recompute_method"] == "uniform":
        for count in _layers_of_stages(v):
            if count % size:
                rule = f"must divide the {count} layers of a stage (recompute_method=uniform)"
                yield "recompute_layers", rule, f"recompute_layers={math.gcd(count, size)}"
        if mode.gathers_weights and size > 1:
            rule = f"mode={name} shares the gathered weights of one layer between recompute and backward"
            yield "recompute_layers", f"{rule} (recompute_method=uniform)", "recompute_layers=1"
    if v["distribute_saved"] and (mode.sequence or mode.uneven):
        owners = whose(lambda one: not one.sequence and not one.uneven)
        rule = "splits them already" if mode.sequence else "has no equal parts of them"
        yield (
            "distribute_saved",
            f"is for hidden states that are whole (mode={owners}); mode={name} {rule}",
            "distribute_saved=false",
        )


def _layers_of_stages(v: Mapping[str, Any]) -> tuple[int, ...]:
    """The numbers of layers of the stages; none for layers that stages cannot share, which another rule refuses."""
    first, last = v["first_layers"] or None, v["last_layers"] or None
    try:
        group = PipelineGroup(ranks=tuple(range(v["pp"])), chunks=v["chunks"])
        held = [group.layers(v["layers"], rank, first=first, last=last) for rank in range(v["pp"])]
        return tuple({layers.stop - layers.start for layers in held})  # len() of a vast range overflows
    except CaseError:
        return ()
