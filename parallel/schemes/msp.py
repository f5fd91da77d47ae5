"""msp: InternEvo's sequence parallelism that keeps. Hidden states [B, S, D] are split on S over tp; a column linear
gathers its input once and saves it whole for backward.

Every column linear gathers by itself: w1 and w3 send the same tensor twice unless they are fused. Partial gradients are
those of norms, q/k norms and row biases. They are sums over this rank's tokens (or heads), added up one by one, never
averaged (decision G1). Learned positions meet the hidden states before the split, so theirs are whole. Source:
InternEvo's msp (modes.md 2, 2.1, 3.3, 3.4, 3.7). Megatron's sequence parallelism gathers again, as `fsp` does.
"""

from functools import partial

from shardproof.parallel.model.strategy import Strategy
from shardproof.parallel.schemes import tensor

MSP = Strategy(
    name="msp",
    sequence_dim=1,
    placements=tensor.placements,
    activation=partial(tensor.activation, sequence_split=True),
    partial=tensor.sequence_partial,
    coalesced=False,
    parts=partial(tensor.parts, sequence_dim=1, sequence_split=True, keep=True),
    rows=tensor.SPLIT,
)
