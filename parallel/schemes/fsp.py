"""fsp: InternEvo's sequence parallelism that gathers again. Forward is `msp`'s, bit for bit.

A column linear saves its slice of the input, 1/p of what `msp` saves, and gathers it a second time in backward.

Source: InternEvo's fsp (modes.md 2, 2.1, 3.3, 3.4, 3.7).
"""

from dataclasses import replace
from functools import partial

from shardproof.parallel.schemes import tensor
from shardproof.parallel.schemes.msp import MSP

FSP = replace(
    MSP,
    name="fsp",
    parts=partial(tensor.parts, sequence_dim=1, sequence_split=True),
    rows=(*MSP.rows, *tensor.GATHERED_AGAIN),
)
