"""The heads of each rank, and where their rows lie in a fused query/key/value weight.

A rank holds whole kv heads and all query heads that use them, so that attention needs no communication. Each fused
order is one function: the order in which (part, head) lie in a weight. A rank's weight is again a weight of the same
order, with fewer heads: where its rows come from follows from that alone.

    order      rows, `size` a head                            used by
    blocks     q of all heads; k of all; v of all             containers of OPT, Llama; GLM, MPT, QWen, Phi-3, BigCode
    groups     per kv head: its q heads, k, v                 Bloom, Falcon, GPT-NeoX, Megatron, InternLM2
    codegen    4 blocks of a quarter of the heads: q, v, k    CodeGen

With fewer kv heads than ranks there is a choice (`spare`): refuse; leave ranks without heads; give several ranks a copy
of a kv head. Each copy has a share of its query heads (BigCode), and the gradients of copies must be summed. Source:
DeepSpeed 0.19.8 `module_inject/fusedqkv_utils.py` (experts.md 27.4), arXiv:2305.13245 (grouped queries).
"""

from collections.abc import Callable
from dataclasses import dataclass

from shardproof.parallel.slicing.held import Held, even_shares, in_units, joined
from shardproof.reference.errors import CaseError

SPARE = ("refuse", "empty", "replicate")
"""Choices for ranks for which no kv head is left."""
CODEGEN_BLOCKS = 4
"""Blocks of CodeGen's fused weight, fixed in the model's code."""
Row = tuple[str, int]
"""Rows of a head in a fused weight: part "q", "k" or "v", and the number of the head among those of its part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """`query` query heads share `kv` key and value heads, `size` features each. Raises CaseError when they cannot."""

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
    """The heads of every rank: kv heads in turn, the first ranks one more, each with its query heads.

    Raises CaseError for fewer kv heads than ranks unless `spare` says otherwise.
    """
    if spare not in SPARE:
        raise CaseError("spare", spare, "is not a known word", "|".join(SPARE))
    if heads.kv < ranks and spare == "refuse":
        legal = f"tp={heads.kv}, or spare=empty or spare=replicate"
        raise CaseError("kv_heads", heads.kv, f"leaves a rank of tp={ranks} without a head", legal)
    if heads.kv < ranks and spare == "replicate":
        return _copied(heads, ranks)
    found, first = [], 0
    for own in even_shares(heads.kv, ranks):
        last = first + own
        found.append(HeadShare(query=range(first * heads.group, last * heads.group), kv=range(first, last)))
        first = last
    return tuple(found)


def _copied(heads: Heads, ranks: int) -> tuple[HeadShare, ...]:
    """Every kv head on ranks/kv ranks, each with an equal share of its query heads."""
    if ranks % heads.kv or heads.group % (ranks // heads.kv):
        rule = f"cannot be copied to tp={ranks} ranks with equal shares of heads={heads.query}"
        raise CaseError("kv_heads", heads.kv, rule, f"tp={heads.kv}")
    own = heads.query // ranks
    return tuple(
        HeadShare(query=range(rank * own, (rank + 1) * own), kv=range(kv := rank * heads.kv // ranks, kv + 1))
        for rank in range(ranks)
    )


def query_rows(heads: Heads, ranks: int, *, spare: str = "refuse") -> Held:
    """Rows of a query projection of its own; also the columns of the output projection."""
    return in_units(tuple(joined([share.query]) for share in shares(heads, ranks, spare=spare)), heads.size)


def kv_rows(heads: Heads, ranks: int, *, spare: str = "refuse") -> Held:
    """Rows of a key or value projection of its own."""
    return in_units(tuple(joined([share.kv]) for share in shares(heads, ranks, spare=spare)), heads.size)


def fused_rows(heads: Heads, ranks: int, order: str, *, spare: str = "refuse") -> Held:
    """Rows of a fused query/key/value weight of this order. Raises CaseError when a rank's part is no such weight."""
    if order not in ORDERS:
        raise CaseError("order", order, "is not a known order of a fused weight", "|".join(ORDERS))
    place = {row: number for number, row in enumerate(ORDERS[order](heads.query, heads.kv))}
    found = []
    for share in shares(heads, ranks, spare=spare):
        own = ORDERS[order](len(share.query), len(share.kv)) if share.kv else []
        rows = [place[part, (share.query if part == "q" else share.kv)[number]] for part, number in own]
        found.append(joined(range(row, row + 1) for row in rows))
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
"""Order -> the rows of a weight, one entry a head, from its numbers of query and kv heads."""


def shared_qk_rows(heads: Heads, ranks: int) -> Held:
    """Rows of the value projection, and columns of the output projection, of a model whose heads share query and key.

    Query and key weights are cut contiguously there. A rank takes one value head for two of its query heads, in order,
    then the matching heads of the second half. Yuan with 8 heads on 2 ranks: {0, 1, 4, 5} and {2, 3, 6, 7}. Raises
    CaseError unless every rank has an even number of heads.
    """
    if heads.kv != heads.query or heads.query % (2 * ranks):
        legal = f"heads={-(-heads.query // (2 * ranks)) * 2 * ranks}"
        raise CaseError("heads", heads.query, f"must be kv_heads and an even number for each of tp={ranks}", legal)
    own = heads.query // (2 * ranks)
    half = heads.query // 2
    firsts = [range(rank * own, (rank + 1) * own) for rank in range(ranks)]
    units = tuple(joined([own_, range(own_.start + half, own_.stop + half)]) for own_ in firsts)
    return in_units(units, heads.size)
