"""mtp: InternEvo's tensor parallelism. Hidden states [B, S, D] are whole on every rank of the axis tp.

Unlike `tp`, mtp lays hidden states out as [B, S, D] and splits the token table along hidden by default. Partial
gradients, which are those of q/k norms, are summed one by one. Gathered logits get the plain loss (decision H1).
Source: InternEvo's mtp (modes.md 2, 3.3, 3.4, 3.7).
"""

from functools import partial

from shardproof.parallel.model.strategy import Strategy
from shardproof.parallel.schemes import tensor

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
