"""tp-sp: Megatron tensor parallelism with sequence parallelism. Hidden states [S, B, D] are split on S over tp.

Column linears save their slice of the sequence and gather it again in backward, as Megatron does. The gradients of
norms, row biases and q/k norms are sums over this rank's tokens (or heads). Learned positions meet the hidden states
before the split, so theirs are whole. Source: arXiv:2205.05198; Megatron-Core 0.14 with local layers (modes.md 2, 4.3).
"""

from functools import partial

from shardproof.parallel.model.strategy import Strategy
from shardproof.parallel.schemes import tensor

TP_SP = Strategy(
    name="tp-sp",
    sequence_dim=0,
    placements=tensor.placements,
    activation=partial(tensor.activation, sequence_split=True),
    partial=tensor.sequence_partial,
    parts=partial(tensor.parts, sequence_dim=0, sequence_split=True),
    rows=(*tensor.SPLIT, *tensor.GATHERED_AGAIN),
)
