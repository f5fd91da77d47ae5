"""Laws of every right slice, checked on the elements that ranks hold.

    broken(...)   the laws that a slice of a dim breaks, in words: every element is held, and once but for copies that
                  are declared; a rank holds whole heads; its query heads meet their key and value head; its part of a
                  fused weight is again a weight of the same order, with fewer heads; and these are the heads whose
                  columns of the output projection it holds

The laws know nothing of how a slice was computed, so that what another system cuts can be held against them.

Slices that are drawn are heads and ranks, whole tensors of any bits, and a cut that is joined again.
"""

import torch
from hypothesis import strategies as st
from torch import Tensor

from shardproof.parallel.communication.layout import Placement, meshgrid, shard
from shardproof.parallel.slicing.checkpoint import inverse, same_bits
from shardproof.parallel.slicing.rows import ORDERS, Heads, Ranges, RowRanges, count_holders, query_rows
from shardproof.parallel.slicing.slices import Slice
from shardproof.parallel.slicing.words import Sliced
from shardproof.reference.errors import CaseError


def broken_by(one: Slice, sliced: Sliced) -> list[str]:
    """The laws that a slice of this model breaks; none for a tensor that is whole."""
    if not one.place.cuts:
        return []
    (cut,) = one.place.cuts
    roles = {linear.name: linear.role for linear in sliced.architecture.linears}
    role = {"attn_qkv": "qkv", "attn_o": "out"}.get(one.name[:-1], roles.get(one.name.rpartition(".")[0], ""))
    fused = role == "qkv"
    return broken(
        cut.held,
        one.place.shape[cut.dim or 0],
        heads=sliced.attention if fused else None,
        order="blocks" if sliced.path == "container" else sliced.architecture.order,
        context=query_rows(sliced.attention, sliced.tp, spare=sliced.spare) if fused else (),
        unit=sliced.head_dim if role in ("q", "k", "v", "value", "out") else 1,
        copied=one.copied,
    )


def copies(held: RowRanges, length: int) -> int:
    """How many elements are held more than once, each counted as often as it is held too many times."""
    return sum(max(times - 1, 0) for times in count_holders(held, length))


def broken(
    held: RowRanges,
    length: int,
    *,
    heads: Heads | None = None,
    order: str = "",
    context: RowRanges = (),
    unit: int = 1,
    copied: int = 0,
) -> list[str]:
    """The laws that this slice of a dim of `length` elements breaks; none for a right one.

    `heads` and `order`: the dim is that of a fused weight, and `context` what the ranks hold of the output projection's
    columns. `unit`: elements of a head, of a weight of query, key or value alone. `copied`: how many elements are meant
    to be held once too often.
    """
    beyond = [part.stop for own in held for part in own if part.stop > length]
    if beyond:
        return [f"element {max(beyond) - 1} is held, and there are {length}"]
    times = count_holders(held, length)
    found = []
    if lost := times.count(0):
        found.append(f"{lost} of {length} elements are held by no rank, the first is {times.index(0)}")
    if copies(held, length) != copied:
        found.append(f"{copies(held, length)} elements are held more than once, {copied} are meant to be")
    cuts = [cut for own in held for part in own for cut in (part.start, part.stop) if cut % unit]
    if cuts:
        found.append(f"the cut at element {cuts[0]} falls inside a head of {unit}")
    if heads is not None:
        for rank, own in enumerate(held):
            columns = context[rank] if context else ()
            found += [f"rank {rank}: {law}" for law in separated(own, heads, order, columns)]
    return found


def of_heads(held: RowRanges, heads: Heads, order: str) -> list[str]:
    """The laws that a cut of a fused weight of this order breaks, or with order "" of the weight of the queries.

    The output projection is cut by heads.
    """
    if not order:
        return broken(held, heads.query * heads.size, unit=heads.size)
    context = query_rows(heads, len(held), spare="empty")
    return broken(held, heads.fused, heads=heads, order=order, context=context)


def separated(own: Ranges, heads: Heads, order: str, columns: Ranges) -> list[str]:
    """Reasons why a rank's part of a fused weight is no weight of the same order with fewer heads.

    The heads are those of these columns of the output projection.
    """
    rows = [row for part in own for row in part]
    size = heads.size
    units = [rows[start : start + size] for start in range(0, len(rows), size)]
    if any(unit[0] % size or unit != list(range(unit[0], unit[0] + size)) for unit in units):
        return [f"holds a part of a head: its {len(rows)} rows are not whole heads of {size}"]
    whole = ORDERS[order](heads.query, heads.kv)
    real = [whole[unit[0] // size] for unit in units]
    query, key, value = (sum(part == own for own, _ in real) for part in "qkv")
    if key != value or bool(key) != bool(query) or (key and query % key):
        return [f"holds {query} query heads, {key} key heads and {value} value heads, which share nothing evenly"]
    if not key:
        return []
    try:
        slots = ORDERS[order](query, key)
    except CaseError as problem:
        return [str(problem)]
    held = dict(zip(slots, real, strict=True))
    for (part, number), (found, _) in held.items():
        if part != found:
            return [f"takes a head of {found} for its {part} head {number}"]
    for (part, number), (_, head) in held.items():
        partner = held["k", number * key // query if part == "q" else number][1]
        if part == "q" and head // heads.group != partner:
            return [f"query head {head} meets key head {partner}"]
        if part == "v" and head != partner:
            return [f"value head {head} meets key head {partner}"]
    mine = [held["q", number][1] for number in range(query)]
    theirs = [column // size for part in columns for column in part][::size]
    if mine != theirs:
        return [f"its query heads are {_list(mine)}, its columns of the output projection those of {_list(theirs)}"]
    return []


def _list(numbers: list[int]) -> str:
    return " ".join(map(str, numbers)) or "none"


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn, torch.bool)


@st.composite
def heads_and_ranks(draw: st.DrawFn, /) -> tuple[Heads, int]:
    """Heads with at least one kv head for each rank."""
    ranks = draw(st.integers(1, 6))
    kv = draw(st.integers(ranks, ranks + 6))
    return Heads(query=kv * draw(st.integers(1, 4)), kv=kv, size=draw(st.integers(1, 5))), ranks


@st.composite
def few_heads_and_ranks(draw: st.DrawFn, /) -> tuple[Heads, int]:
    """Fewer kv heads than ranks."""
    ranks = draw(st.integers(2, 6))
    kv = draw(st.integers(1, ranks - 1))
    return Heads(query=kv * draw(st.integers(1, 6)), kv=kv, size=draw(st.integers(1, 5))), ranks


def drawn(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Any bits of this dtype, NaN and negative zeros of float dtypes included."""
    size = torch.empty(0, dtype=dtype).element_size()
    last = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, last, (*shape, size), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return raw.view(dtype).view(shape)


def parts_of(whole: Tensor, place: Placement, ranks: int) -> list[Tensor]:
    return [shard(whole, place, at) for at in meshgrid({"tp": ranks})]


def check_round_trip(whole: Tensor, place: Placement, ranks: int) -> None:
    assert same_bits(inverse(parts_of(whole, place, ranks), place), whole)
