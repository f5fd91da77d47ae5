"""The ids at the edges of vocabulary shards: the first and the last real row of every shard.

A range of rows that is one short or one long shows at these ids alone. So the built-in corpus gets them mixed in (see
`reference.data.batches`). They are the edges of 2 to 8 equal shards, as far as the vocabulary splits or is padded that
way. So the data do not change with tp and wp. Shards of this very case that are not among these come last.
"""

from functools import lru_cache

from reference.case import Case

_PARTS = (2, 4, 8, 3, 6, 5, 7)
"""Numbers of shards, the usual ones first: small data hold as many edges as they can, in this order."""
_PADDED_TO = 128
"""Rows of which a shard of the padded vocabulary is a multiple (Megatron)."""


def own_edges(case: Case) -> tuple[int, ...]:
    """First and last id of every shard of this case, over tp (logits, tables) and over wp (weights of isp), sorted."""
    sizes = {case.padded_vocab // parts for parts in (case.tp, case.wp)}
    return tuple(sorted({edge for size in sizes for edge in _edges(case.vocab, size)}))


def shard_edges(case: Case) -> tuple[int, ...]:
    """Every id to mix in, each once, the most usual splits first."""
    return _usual(case.vocab, case.family == "gpt", own_edges(case))


@lru_cache(maxsize=64)
def _usual(vocab: int, is_padded: bool, own: tuple[int, ...]) -> tuple[int, ...]:
    found: list[int] = []
    for parts in _PARTS:
        if is_padded:
            found += _edges(vocab, -(-vocab // (_PADDED_TO * parts)) * _PADDED_TO)
        elif vocab % parts == 0:
            found += _edges(vocab, vocab // parts)
    return tuple(dict.fromkeys([*found, *own]))


def _edges(vocab: int, size: int) -> list[int]:
    """First and last id of every shard of `size` rows that holds a real one."""
    return [edge for first in range(0, vocab, size) for edge in (first, min(first + size, vocab) - 1)]
