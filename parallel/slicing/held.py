"""Which elements of one dim of a tensor every rank holds: ranges, in the order in which they lie on the rank.

Numbers count elements of that dim (rows or columns), or units of several elements each (heads) until `in_units`. How
many elements each rank holds follows DeepSpeed's AutoTP rule:

    follows kv heads    the tensor is no MLP's and no head's, and the kv heads divide the dim: ranks get whole kv heads
                        with their query heads, the first ranks one more when the heads do not divide evenly
    nearly even         otherwise: multiples of `grain` elements, the first ranks one grain more, the last rank also the
                        rest below a grain; a dim shorter than a grain is divided by single elements

The sizes always sum to the dim. Source: DeepSpeed 0.19.8 `module_inject/tp_shard.py` get_shard_size (modes.md 8.2,
experts.md 27.3). There a name is looked for anywhere in the module's path ("self_attn.w1proj" counts as an MLP's), and
the head is known by its bare name. Here both are whole parts of the path.
"""

from collections.abc import Iterable, Sequence

from shardproof.reference.errors import CaseError

Ranges = tuple[range, ...]
"""Elements of one rank, in the order in which it holds them."""
Held = tuple[Ranges, ...]
"""Elements of every rank, by rank."""
_MLP = frozenset({"mlp", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})
"""Parts of a module's path that mark an MLP: its features belong to no head."""
_HEADS = frozenset({"lm_head", "embed_out"})
"""Last part of the path of a language model's head."""


def even_shares(total: int, ranks: int) -> tuple[int, ...]:
    """`total` things over `ranks`, the first ones one more each: (3, 3, 2, 2) for 10 over 4."""
    return tuple(total // ranks + (rank < total % ranks) for rank in range(ranks))


def shard_sizes(
    total: int, ranks: int, *, kv_heads: int | None = None, grain: int = 1, name: str = ""
) -> tuple[int, ...]:
    """The elements of each rank of a dim of `total` elements; 0 is possible (see `nonempty`).

    `name` is the dotted module name ("mlp.down_proj").
    """
    path = name.split(".")
    if kv_heads and total % kv_heads == 0 and _MLP.isdisjoint(path) and path[-1] not in _HEADS:
        return tuple(share * (total // kv_heads) for share in even_shares(kv_heads, ranks))
    if total < grain:
        return even_shares(total, ranks)
    *sizes, last = (share * grain for share in even_shares(total // grain, ranks))
    return (*sizes, last + total % grain)


def nonempty(sizes: tuple[int, ...], key: str, value: int) -> tuple[int, ...]:
    """Return the sizes. Raises CaseError, about the word `key=value`, when a rank would hold nothing."""
    if 0 in sizes:
        rank = sizes.index(0)
        rule = f"leaves rank {rank} of {len(sizes)} with nothing"
        raise CaseError(key, value, rule, f"{key}={len(sizes)}")
    return sizes


def in_turn(sizes: Sequence[int], *, first: int = 0) -> Held:
    """Rank i holds the next sizes[i] elements, the first rank from element `first` on."""
    found: list[Ranges] = []
    for size in sizes:
        found.append(joined([range(first, first + size)]))
        first += size
    return tuple(found)


def beside(*parts: Held) -> Held:
    """Every rank holds what it holds of each part, one part behind the other."""
    return tuple(joined(part for ranges in own for part in ranges) for own in zip(*parts, strict=True))


def in_units(held: Held, size: int) -> Held:
    """The elements of units of `size` elements each."""
    return tuple(tuple(range(part.start * size, part.stop * size) for part in ranges) for ranges in held)


def joined(ranges: Iterable[range]) -> Ranges:
    """These elements in their order with as few ranges as possible."""
    found: list[range] = []
    for part in ranges:
        if part and found and found[-1].stop == part.start:
            found[-1] = range(found[-1].start, part.stop)
        elif part:
            found.append(part)
    return tuple(found)


def widths(held: Held) -> tuple[int, ...]:
    """How many elements each rank holds."""
    return tuple(sum(map(len, ranges)) for ranges in held)


def times_held(held: Held, length: int) -> list[int]:
    """For each of `length` elements, how many times it is held, over all ranks."""
    times = [0] * length
    for ranges in held:
        for part in ranges:
            for element in part:
                times[element] += 1
    return times
