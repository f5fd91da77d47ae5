"""One mode, one file: its table, its choices, its closed form.

How to read a table (tests parse it and hold it against the closed form and against what was recorded):

    tensor    dotted module names with * and {a,b}, `loss`, or `step AXIS` for what happens once a step before the
              optimizer; every other row counts for each micro-batch and each module. Words `key=value` behind it: the
              row holds for cases with these words only
    forward   calls in the order of ops, "-" for none, "3 all_reduce" for three; backward likewise
    bytes     payload of each call: A one whole activation [S, B, D]; T one number a token in the loss's dtype; V the
              whole padded logits; G all gradients of a rank; P its partial gradients in one call, N each of them
              in a call of its own; W one number in the loss's dtype

Under recompute=full the forward calls of `layers.*` are issued once more in phase recompute. A group of one rank is
bypassed. The broadcasts of the data and the calls of the metric are the same in all modes: see
`parallel.communication.batch` and `parallel.layers.metric`. The table of `isp`, which has two axes and shares gathers
between recompute and backward, has a column for each and its own bytes, stated below it.
"""
