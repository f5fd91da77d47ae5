"""Which layers backward computes again (recompute=full), and which of them together, as one unit.

    recompute_method=uniform    all layers, in units of recompute_layers; a unit saves its input alone
    recompute_method=block      the first recompute_layers layers of every stage, each a unit; the others save all

Source: Megatron-Core 0.16.1 `TransformerBlock._checkpointed_forward` (around.md 16); InternEvo recomputes the first
layers, too (`model.checkpoint`, a share of them).
"""

from __future__ import annotations

from collections.abc import Sequence

from parallel.schedules.stages import stages
from reference.case import Case

__all__ = ["computed_again", "ends_of_units", "in_backward", "units"]


def units(case: Case, layers: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The units among these consecutive layers, which are all of a stage's, in their order."""
    if case.recompute != "full":
        return ()
    size = case.recompute_layers
    if case.recompute_method == "block":
        return tuple((layer,) for layer in layers[:size])
    return tuple(tuple(layers[first : first + size]) for first in range(0, len(layers), size))


def computed_again(case: Case) -> frozenset[int]:
    """The numbers of all layers that are computed again, on whatever stage."""
    return frozenset(layer for stage in stages(case) for unit in units(case, stage.layers) for layer in unit)


def ends_of_units(case: Case) -> frozenset[int]:
    """The numbers of the last layers of all units."""
    return frozenset(unit[-1] for stage in stages(case) for unit in units(case, stage.layers))


def in_backward(case: Case, layers: Sequence[int]) -> tuple[int, ...]:
    """These layers, which are all of a stage's, as backward comes to them: those of a unit from its first one on."""
    made = units(case, layers)
    rest = layers[sum(map(len, made)) :]
    return (*reversed(rest), *(layer for unit in reversed(made) for layer in unit))
