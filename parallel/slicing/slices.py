"""Every tensor of a model, and what each rank holds of it: by AutoTP, or by the container of kernel injection.

    slices(sliced)    the tensors of one layer (all layers are alike), then those outside of the layers

A row linear's bias is whole on every rank and added once, after the sum over the ranks. Source: DeepSpeed 0.19.8
`module_inject/auto_tp.py`, `layers.py`, `containers/opt.py`, `containers/base.py` (modes.md 8, experts.md 27).

DeepSpeed's copies cut every sub-parameter of a weight (q, k, v; gate, up) by itself, and a rank holds its piece of each
(`strided_copy`), or all of a weight at once (`copy`). Weights are [in, out] after a policy's transpose, or [out, in] as
Hugging Face stores them. Source: DeepSpeed 0.19.8 `module_inject/auto_tp.py` ReplaceWithTensorSlicing (experts.md
27.1). There remainders are dropped and parts are always equal thirds: see docs/splitting.md.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardproof.parallel.communication.layout import Cut, Placement
from shardproof.parallel.slicing.rows import (
    RowRanges,
    concat,
    consecutive,
    fused_rows,
    kv_rows,
    nonempty,
    query_rows,
    shard_sizes,
    shared_qk_rows,
)
from shardproof.parallel.slicing.words import Linear, Sliced
from shardproof.reference.errors import CaseError

Shape = tuple[int, ...]


def equal_pieces(shape: Shape, dim: int, parts: Sequence[int], ranks: int) -> Placement:
    """A cut that gives each rank equal shares of every part along a dim, end to end. Raises CaseError for a part that
    `ranks` does not divide.
    """
    if ranks == 1:
        return Placement(shape=shape)
    if any(length % ranks for length in parts):
        legal = str(tuple(-(-length // ranks) * ranks for length in parts))
        raise CaseError("parts", tuple(parts), f"must each be a multiple of ranks={ranks}", legal)
    starts = itertools.accumulate(parts, initial=0)
    shares = (consecutive([size // ranks] * ranks, first=start) for size, start in zip(parts, starts, strict=False))
    return _placement_of_ranges(shape, dim, concat(*shares))


_WHOLE = "whole"
_AFTER = "whole; added once, after the sum"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """A tensor and its cut.

    name        as it is called where it is cut
    sources     the tensors of a checkpoint that it is made of, end to end along their first dim
    transposed  it is the transpose of that: [in, out]
    place       its whole shape, and the elements of one dim that every rank holds
    rule        in words
    copied      elements of the cut dim that lie on several ranks, counted once for each rank after the first
    """

    name: str
    sources: tuple[str, ...]
    place: Placement
    rule: str
    transposed: bool = False
    copied: int = 0


def slices(sliced: Sliced) -> tuple[Slice, ...]:
    """All tensors of this model and what each rank holds. Raises CaseError for a cut that cannot be."""
    layer = _container(sliced) if sliced.path == "container" else _autotp(sliced)
    return (*layer, *_outer(sliced))


def _whole_slice(name: str, shape: Shape, rule: str = _WHOLE) -> Slice:
    return Slice(name=name, sources=(name,), place=Placement(shape=shape), rule=rule)


def _placement_of_ranges(shape: Shape, dim: int, held: RowRanges) -> Placement:
    return Placement(shape=shape, cuts=(Cut(axis="tp", dim=dim, held=held),))


def _autotp(sliced: Sliced) -> Iterator[Slice]:
    for linear in sliced.architecture.linears:
        held, rule = _rows_of_linear(sliced, linear)
        rows = linear.role not in ("out", "down")
        shape = _shape(sliced, linear.role)
        names = [f"{linear.name}.weight"] + ([f"{linear.name}.bias"] if sliced.bias and linear.biased else [])
        for name in names:
            if name.endswith("bias") and not rows:
                yield _whole_slice(name, shape[:1], _AFTER)
                continue
            yield Slice(
                name=name,
                sources=(name,),
                place=_placement_of_ranges(shape if name.endswith("weight") else shape[:1], int(not rows), held),
                rule=rule,
                copied=_copied_kv_rows(sliced, linear.role),
            )
    yield from _norms(sliced)


def _shape(sliced: Sliced, role: str) -> Shape:
    heads, hidden = sliced.attention, sliced.hidden
    query, kv = heads.query * heads.size, heads.kv * heads.size
    rows = {"q": query, "value": query, "k": kv, "v": kv, "qkv": heads.fused, "up": sliced.ffn}
    if role in ("out", "down"):
        return (hidden, query if role == "out" else sliced.ffn)
    return (2 * sliced.ffn if role == "gate_up" else rows[role], hidden)


def _rows_of_linear(sliced: Sliced, linear: Linear) -> tuple[RowRanges, str]:
    """The rows of a linear on every rank (columns for out and down), and the rule in words."""
    heads, tp, spare = sliced.attention, sliced.tp, sliced.spare
    shared = any(other.role == "value" for other in sliced.architecture.linears)
    match linear.role:
        case "value" | "out" if shared:
            return shared_qk_rows(heads, tp), "its value heads: one for two query heads, in both halves"
        case "q":
            return query_rows(heads, tp, spare=spare), "its query heads"
        case "out":
            return query_rows(heads, tp, spare=spare), "its query heads; outputs are summed"
        case "k" | "v":
            return kv_rows(heads, tp, spare=spare), "its kv heads"
        case "qkv":
            order = sliced.architecture.order
            return fused_rows(heads, tp, order, spare=spare), f"its heads, in the order {order!r}"
    sizes = shard_sizes(sliced.ffn, tp, kv_heads=sliced.kv_heads, grain=sliced.grain, name=linear.name)
    sizes = sizes if spare == "empty" else nonempty(sizes, "ffn", sliced.ffn)
    if linear.role == "gate_up":
        return concat(consecutive(sizes), consecutive(sizes, first=sliced.ffn)), "its features of gate and of up"
    return consecutive(sizes), "its features" if linear.role == "up" else "its features; outputs are summed"


def _copied_kv_rows(sliced: Sliced, role: str) -> int:
    """Rows of kv heads that lie on several ranks, counted once for each rank after the first."""
    times = {"k": 1, "v": 1, "qkv": 2}.get(role, 0)
    missing = sliced.tp - sliced.kv_heads if sliced.spare == "replicate" else 0
    return times * max(missing, 0) * sliced.head_dim


def _container(sliced: Sliced) -> Iterator[Slice]:
    """The tensors of kernel injection, [in, out]; a container needs equal shares."""
    tp, hidden, heads, ffn = sliced.tp, sliced.hidden, sliced.attention, sliced.ffn
    for key, value in (("heads", heads.query), ("kv_heads", heads.kv), ("ffn", ffn)):
        if value % tp:
            rule = f"must be a multiple of tp={tp}: a container gives every rank an equal share"
            raise CaseError(key, value, rule, f"{key}={-(-value // tp) * tp}, or path=autotp")
    by_role: dict[str, list[str]] = {}
    for linear in sliced.architecture.linears:
        by_role.setdefault("qkv" if linear.role in ("q", "k", "v") else linear.role, []).append(linear.name)
    query, kv = heads.query * heads.size, heads.kv * heads.size
    # A gated family names gate before up, as its forward pass uses them; the container has up before gate.
    up = by_role["up"][::-1]
    for name, linears, width, parts in (
        ("attn_qkv", by_role["qkv"], 0, (query, kv, kv)),
        ("attn_o", by_role["out"], query, ()),
        ("inter_", up, 0, (ffn,) * len(up)),
        ("output_", by_role["down"], ffn, ()),
    ):
        if parts:
            yield from _columns(sliced, name, linears, parts)
            continue
        place = equal_pieces((width, hidden), 0, (width,), tp)
        sources = (f"{linears[0]}.weight", f"{linears[0]}.bias")
        rule = "its input features; outputs are summed"
        yield Slice(name=f"{name}w", sources=sources[:1], place=place, rule=rule, transposed=True)
        if sliced.bias:
            yield Slice(name=f"{name}b", sources=sources[1:], place=Placement(shape=(hidden,)), rule=_AFTER)
    yield from _norms(sliced)


def _columns(sliced: Sliced, name: str, linears: list[str], parts: tuple[int, ...]) -> Iterator[Slice]:
    """A container's weight [in, out] of which every rank holds its piece of each part of the output, and its bias."""
    tp, hidden, out = sliced.tp, sliced.hidden, sum(parts)
    pieces = " + ".join(str(length // tp) for length in parts)
    rule = f"its piece of each part: {pieces}" if len(parts) > 1 else "its features"
    for leaf, shape in (("weight", (hidden, out)), ("bias", (out,))):
        if leaf == "weight" or sliced.bias:
            yield Slice(
                name=f"{name}{leaf[0]}",
                sources=tuple(f"{linear}.{leaf}" for linear in linears),
                place=equal_pieces(shape, len(shape) - 1, parts, tp),
                rule=rule,
                transposed=leaf == "weight",
            )


def _norms(sliced: Sliced) -> Iterator[Slice]:
    for norm in sliced.architecture.norms:
        for leaf in ("weight", "bias") if sliced.architecture.norm_bias else ("weight",):
            yield _whole_slice(f"{norm}.{leaf}", (sliced.hidden,))


def _outer(sliced: Sliced) -> Iterator[Slice]:
    """Embeddings, the last norm, and the head."""
    for name, words in sliced.architecture.outer:
        yield _whole_slice(name, tuple(getattr(sliced, word) for word in words))
    total, dim = (sliced.hidden, 1) if sliced.head == "sum" else (sliced.vocab, 0)
    head = sliced.architecture.head
    sizes = shard_sizes(total, sliced.tp, grain=sliced.grain, name="lm_head")
    sizes = sizes if sliced.spare == "empty" else nonempty(sizes, "hidden" if dim else "vocab", total)
    rule = "its input features; logits are summed" if dim else "its tokens; logits are gathered"
    held = consecutive(sizes)
    place = _placement_of_ranges((sliced.vocab, sliced.hidden), dim, held)
    yield Slice(name=f"{head}.weight", sources=(f"{head}.weight",), place=place, rule=rule)
    if sliced.architecture.head_bias and dim:
        yield _whole_slice(f"{head}.bias", (sliced.vocab,), _AFTER)
    elif sliced.architecture.head_bias:
        yield Slice(
            name=f"{head}.bias",
            sources=(f"{head}.bias",),
            place=_placement_of_ranges((sliced.vocab,), 0, held),
            rule=rule,
        )
