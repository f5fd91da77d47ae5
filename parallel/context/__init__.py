"""Context parallelism: every rank of an axis holds some tokens of each row, and attention meets the keys of the others.

`blocks` says which tokens, and has attention over a part of the keys and how parts are merged. `scheme` has ways to
meet the keys of others, with their calls, mathematics and closed forms; all of them compute the same function:

    method     | what happens to k and v              | calls of a layer, c ranks                | needs
    ring       | they go round, one hop a step        | c-1 hops; backward 2c-1                  | any slices
    gathered   | they are gathered whole              | 2 all_gather; backward 2 reduce_scatter  | equal slices
    exchanged  | as q, tokens are swapped for heads   | 3 all_to_all; backward 3                 | also: c divides heads
    nested     | swapped among a ranks, ring of c/a   | those of both                            | also: a divides heads

Everything else of a layer works on single tokens: there, only their number changes.
"""
