"""Which rows (or columns) of a weight every rank holds: ranges, in the order in which they lie on the rank.

How many elements of a dim each rank holds follows DeepSpeed's AutoTP rule. The sizes sum to the dim.

    by kv heads    where the kv heads divide the dim of a tensor outside of MLPs and the language model's head: whole kv
                   heads with their query heads; the first ranks get one head more when the heads do not divide evenly
    nearly even    otherwise: multiples of `grain` elements; the first ranks get one grain more, and the last rank also
                   gets the rest below a grain; a dim shorter than a grain is divided by single elements

Source: DeepSpeed 0.19.8 `module_inject/tp_shard.py` get_shard_size (modes.md 8.2, experts.md 27.3). It knows an MLP by
a word anywhere in the module's path (even "self_attn.w1proj"), and the head by its bare name. Here the word and the
head's name are whole parts of the path.

A rank holds whole kv heads and all query heads that use them, so that attention needs no communication. A fused weight
has its rows in one of these orders, and the part that a rank holds is a weight of the same order with fewer heads:

    order      rows, `size` for each head                     used by
    blocks     q of all heads; k of all; v of all             containers of OPT, Llama; GLM, MPT, QWen, Phi-3, BigCode
    groups     per kv head: its q heads, k, v                 Bloom, Falcon, GPT-NeoX, Megatron, InternLM2
    codegen    4 blocks of a quarter of the heads: q, v, k    CodeGen

With fewer kv heads than ranks, `spare` decides: refuse, leave ranks without heads, or copy each kv head to several
ranks (BigCode). Each copy serves a share of the query heads, and the gradients of copies must be summed. Source:
DeepSpeed 0.19.8 `module_inject/fusedqkv_utils.py` (experts.md 27.4), arXiv:2305.13245 (grouped queries).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from shardproof.reference.errors import CaseError

Ranges = tuple[range, ...]
"""The elements that one rank holds, in the order in which they lie there."""
RowRanges = tuple[Ranges, ...]
"""The elements that every rank holds, by rank."""
_MLP = frozenset({"mlp", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})
"""Parts of a module's path that mark an MLP: its features belong to no head."""
_HEADS = frozenset({"lm_head", "embed_out"})
"""Names of a language model's head: the last part of its path."""


def even_shares(total: int, ranks: int) -> tuple[int, ...]:
    """`total` things divided over `ranks` ranks, the first of which get one more: (3, 3, 2, 2) for 10 over 4."""
    return tuple(total // ranks + (rank < total % ranks) for rank in range(ranks))


def shard_sizes(
    total: int, ranks: int, *, kv_heads: int | None = None, grain: int = 1, name: str = ""
) -> tuple[int, ...]:
    """How many of the `total` elements of a dim each rank holds; it may be 0 (see `nonempty`).

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


def consecutive(sizes: Sequence[int], *, first: int = 0) -> RowRanges:
    """Rank i holds the next sizes[i] elements; the first rank begins at element `first`."""
    found: list[Ranges] = []
    for size in sizes:
        found.append(merge_ranges([range(first, first + size)]))
        first += size
    return tuple(found)


def concat(*parts: RowRanges) -> RowRanges:
    """The rows of every rank when these parts follow each other."""
    return tuple(merge_ranges(part for ranges in own for part in ranges) for own in zip(*parts, strict=True))


def in_units(held: RowRanges, size: int) -> RowRanges:
    """The elements of these units (such as heads), `size` elements each."""
    return tuple(tuple(range(part.start * size, part.stop * size) for part in ranges) for ranges in held)


def merge_ranges(ranges: Iterable[range]) -> Ranges:
    """The same elements in the same order, in as few ranges as possible."""
    found: list[range] = []
    for part in ranges:
        if part and found and found[-1].stop == part.start:
            found[-1] = range(found[-1].start, part.stop)
        elif part:
            found.append(part)
    return tuple(found)


def widths(held: RowRanges) -> tuple[int, ...]:
    """The number of elements that each rank holds."""
    return tuple(sum(map(len, ranges)) for ranges in held)


def count_holders(held: RowRanges, length: int) -> list[int]:
    """For each of `length` elements, on how many ranks it lies."""
    times = [0] * length
    for ranges in held:
        for part in ranges:
            for element in part:
                times[element] += 1
    return times


SPARE = ("refuse", "empty", "replicate")
"""What to do when there are fewer kv heads than ranks."""
CODEGEN_BLOCKS = 4
"""Blocks of CodeGen's fused weight, fixed in the model's code."""
Row = tuple[str, int]
"""The rows of one head in a fused weight: the part "q", "k" or "v", and the number of the head in that part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """`query` query heads share `kv` key and value heads of `size` features each. Raises CaseError when they cannot."""

    query: int
    kv: int
    size: int

    def __post_init__(self) -> None:
        for key, value in (("heads", self.query), ("kv_heads", self.kv), ("head_dim", self.size)):
            if value < 1:
                raise CaseError(key, value, "must be at least 1", f"{key}=1")
        if self.query % self.kv:
            raise CaseError("kv_heads", self.kv, f"must divide heads={self.query}", f"kv_heads={self.query}")

    @property
    def group(self) -> int:
        """Query heads of one kv head."""
        return self.query // self.kv

    @property
    def fused(self) -> int:
        """Rows of a fused weight."""
        return (self.query + 2 * self.kv) * self.size


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShare:
    """The heads of one rank, by number."""

    query: range
    kv: range


def shares(heads: Heads, ranks: int, *, spare: str = "refuse") -> tuple[HeadShare, ...]:
    """The heads of every rank: consecutive kv heads with their query heads; the first ranks may have one kv head more.

    Raises CaseError for fewer kv heads than ranks with spare=refuse, or when the copies would not be equal.
    """
    if spare not in SPARE:
        raise CaseError("spare", spare, "is not a known word", "|".join(SPARE))
    if heads.kv < ranks and spare == "refuse":
        legal = f"tp={heads.kv}, or spare=empty or spare=replicate"
        raise CaseError("kv_heads", heads.kv, f"leaves a rank of tp={ranks} without a head", legal)
    if heads.kv < ranks and spare == "replicate":
        return _copy_kv_heads(heads, ranks)
    found, first = [], 0
    for own in even_shares(heads.kv, ranks):
        last = first + own
        found.append(HeadShare(query=range(first * heads.group, last * heads.group), kv=range(first, last)))
        first = last
    return tuple(found)


def _copy_kv_heads(heads: Heads, ranks: int) -> tuple[HeadShare, ...]:
    """Every kv head on ranks/kv ranks, each with an equal share of its query heads."""
    if ranks % heads.kv or heads.group % (ranks // heads.kv):
        rule = f"cannot be copied to tp={ranks} ranks with equal shares of heads={heads.query}"
        raise CaseError("kv_heads", heads.kv, rule, f"tp={heads.kv}")
    own = heads.query // ranks
    return tuple(
        HeadShare(query=range(rank * own, (rank + 1) * own), kv=range(kv := rank * heads.kv // ranks, kv + 1))
        for rank in range(ranks)
    )


def query_rows(heads: Heads, ranks: int, *, spare: str = "refuse") -> RowRanges:
    """Rows of a separate query projection; also the columns of the output projection."""
    return in_units(tuple(merge_ranges([share.query]) for share in shares(heads, ranks, spare=spare)), heads.size)


def kv_rows(heads: Heads, ranks: int, *, spare: str = "refuse") -> RowRanges:
    """Rows of a separate key or value projection."""
    return in_units(tuple(merge_ranges([share.kv]) for share in shares(heads, ranks, spare=spare)), heads.size)


def fused_rows(heads: Heads, ranks: int, order: str, *, spare: str = "refuse") -> RowRanges:
    """Rows of a fused query/key/value weight of this order. Raises CaseError when a rank's part would not have it."""
    if order not in ORDERS:
        raise CaseError("order", order, "is not a known order of a fused weight", "|".join(ORDERS))
    place = {row: number for number, row in enumerate(ORDERS[order](heads.query, heads.kv))}
    found = []
    for share in shares(heads, ranks, spare=spare):
        own = ORDERS[order](len(share.query), len(share.kv)) if share.kv else []
        rows = [place[part, (share.query if part == "q" else share.kv)[number]] for part, number in own]
        found.append(merge_ranges(range(row, row + 1) for row in rows))
    return in_units(tuple(found), heads.size)


def _blocks(query: int, kv: int) -> list[Row]:
    return [("q", head) for head in range(query)] + [(part, head) for part in "kv" for head in range(kv)]


def _groups(query: int, kv: int) -> list[Row]:
    group = query // kv
    return [
        row
        for head in range(kv)
        for row in [*(("q", head * group + number) for number in range(group)), ("k", head), ("v", head)]
    ]


def _codegen(query: int, kv: int) -> list[Row]:
    if query != kv or query % CODEGEN_BLOCKS:
        rule = f"on a rank must be equal to kv_heads and a multiple of the {CODEGEN_BLOCKS} blocks of CodeGen"
        raise CaseError("heads", query, rule, f"heads={CODEGEN_BLOCKS}")
    quarter = query // CODEGEN_BLOCKS
    starts = range(0, query, quarter)
    return [(part, head) for start in starts for part in "qvk" for head in range(start, start + quarter)]


ORDERS: dict[str, Callable[[int, int], list[Row]]] = {"blocks": _blocks, "groups": _groups, "codegen": _codegen}
"""Order -> a function from the numbers of query and kv heads to the rows of a weight, one entry for each head."""


def shared_qk_rows(heads: Heads, ranks: int) -> RowRanges:
    """Rows of the value projection, and columns of the output projection, of a model whose heads share query and key.

    Query and key weights are cut contiguously. A rank's value heads are half as many consecutive heads of the first
    half, then the heads at the same places of the second half. Yuan with 8 heads on 2 ranks: {0, 1, 4, 5} and {2, 3, 6,
    7}. Raises CaseError unless every rank has an even number of heads.
    """
    if heads.kv != heads.query or heads.query % (2 * ranks):
        legal = f"heads={-(-heads.query // (2 * ranks)) * 2 * ranks}"
        raise CaseError("heads", heads.query, f"must be kv_heads and an even number for each of tp={ranks}", legal)
    own = heads.query // (2 * ranks)
    half = heads.query // 2
    firsts = [range(rank * own, (rank + 1) * own) for rank in range(ranks)]
    units = tuple(merge_ranges([own_, range(own_.start + half, own_.stop + half)]) for own_ in firsts)
    return in_units(units, heads.size)
