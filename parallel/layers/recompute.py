"""Layers that backward computes again from their saved input (activation recomputation, arXiv:1604.06174).

A unit of layers saves what enters it and nothing of what lies inside; when backward reaches the unit, all of it is
computed again. Three things differ between systems:

    end     to the unit's end, last collective included (Megatron-Core), or up to the last tensor that backward needs
            (`early_stop`, torch's default): a sum behind the last product is not repeated
    input   whole, or a flat part of 1/p on each of the p tensor-parallel ranks (`distribute`), gathered before the
            unit is computed again (Megatron-Core's `distribute_saved_activations`)
    states  dropout draws the same numbers again; afterwards its streams go on as if nothing was drawn (`contexts`)

Source: Megatron-Core 0.16.1 `CheckpointFunction`, `TransformerBlock._checkpointed_forward`; torch `checkpoint` without
reentrance (around.md 16).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from shardproof.parallel.communication.collectives import all_gather, own_slice
from shardproof.parallel.communication.expectation import ACTIVATION, CallRow, in_modules
from shardproof.parallel.communication.layout import Axis
from shardproof.parallel.communication.schedules import ends_of_units
from shardproof.reference.case import Case


def checkpoint_unit(
    unit: Callable[[Tensor], Tensor],
    x: Tensor,
    *,
    early_stop: bool,
    distribute: Axis | None,
    contexts: Callable[[], tuple[AbstractContextManager[None], AbstractContextManager[None]]],
) -> Tensor:
    """unit(x), of which only x is saved: whole or, with `distribute`, a part on each rank of that axis.

    `contexts` gives the contexts in which forward and its repetition run.
    """
    through, saved = unit, x
    if distribute is not None and distribute.size > 1:
        axis, shape, first = distribute, x.shape, [x]

        def through(part: Tensor) -> Tensor:
            return unit(first.pop() if first else all_gather(part, axis, dim=0).requires_grad_().view(shape))

        saved = own_slice(x.detach().flatten(), axis, dim=0).clone()  # a part of its own memory, not a view of all
    y: Tensor = checkpoint(
        through, saved, use_reentrant=False, preserve_rng_state=False, context_fn=contexts, early_stop=early_stop
    )
    return y


def _first_to_need(case: Case) -> list[str]:
    """The module of every unit whose backward first needs what the unit computed: the last linear, or its dropout."""
    return [f"layers.{last}" if case.dropout else f"layers.{last}.mlp.w2" for last in sorted(ends_of_units(case))]


SAVED = CallRow(
    in_modules(_first_to_need),
    "recompute",
    "all_gather",
    ACTIVATION,
    "the saved input of a unit",
    when="distribute_saved",
)
