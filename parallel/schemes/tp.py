"""tp: Megatron tensor parallelism. Hidden states [S, B, D] are whole on every rank of the axis tp.

Norms, learned positions and row biases are whole, and so are their gradients; those of q/k norms are sums over this
rank's heads. Source: arXiv:1909.08053; Megatron-Core 0.14 with local layers (modes.md 2, 4.3).
"""

from functools import partial

from shardproof.parallel.model.strategy import Strategy
from shardproof.parallel.schemes import tensor

TP = Strategy(
    name="tp",
    sequence_dim=0,
    placements=tensor.placements,
    activation=partial(tensor.activation, sequence_split=False),
    partial=tensor.head_partial,
    parts=partial(tensor.parts, sequence_dim=0, sequence_split=False),
    rows=tensor.WHOLE,
)
