"""mtp: InternEvo's tensor parallelism. Hidden states [B, S, D] are whole on every rank of the axis tp.

Beside `tp` it lays hidden states out as [B, S, D], splits the token table along hidden by default, and sums
partial gradients, which are those of q/k norms, one by one. Gathered logits get the plain loss (decision H1).
Source: InternEvo's mtp (modes.md 2, 3.3, 3.4, 3.7).
"""

from __future__ import annotations

from functools import partial

from parallel.model.strategy import Strategy
from parallel.schemes import tensor

MTP = Strategy(
    name="mtp",
    sequence_dim=1,
    placements=tensor.placements,
    activation=partial(tensor.activation, sequence_split=False),
    partial=tensor.head_partial,
    coalesced=False,
    parts=partial(tensor.parts, sequence_dim=1, sequence_split=False),
    rows=tensor.WHOLE,
)
