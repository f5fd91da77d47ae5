"""Two checkpoints of any layouts, compared tensor by tensor: what agrees, and what the first difference is.

Full tensors are compared exactly (NaN equals NaN), whatever chunks they were written in; where dtypes differ, in the
wider one. A cause is stated only if it turns every element of A's tensor into that of B's. States of random streams
belong to ranks, so they are compared only if both checkpoints were written at the same layout.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import Tensor

from shardproof.parallel.checkpoints.folder import Stored, Weights
from shardproof.parallel.checkpoints.state import RANKS, CheckpointError, dtype_word
from shardproof.reference.case import Case
from shardproof.reference.checkpoints.foreign import Form, is_foreign, is_megatron, parameters
from shardproof.reference.errors import CaseError

Source = Stored | Weights
_TABLE = "model.embedding.tokens.weight"
_VOCABULARY = re.compile(r"(embedding\.tokens|head)\.weight")
_KINDS = (
    ("parameters", r"model\."),
    ("moments", r"optimizer\..*\.exp_avg(_sq)?$"),
    ("counts of optimizer steps", r"optimizer\..*\.step$"),
    ("counters", r"train\."),
    ("random streams", r"rng\."),
    ("others", ""),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Likeness:
    """Numbers of a kind of tensors: those compared, their elements, and those that differ."""

    kind: str
    tensors: int
    elements: int
    differ: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Unlike:
    """A tensor that differs: which part, by how much, which ranks wrote it, and why if that is certain."""

    key: str
    what: str
    where: str
    error: str
    pieces: str
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointComparison:
    """All that was compared of A and B. `first` is the first tensor that differs, `others` the keys of the rest."""

    kinds: tuple[Likeness, ...]
    first: Unlike | None
    others: tuple[str, ...]
    notes: tuple[str, ...]


def compare(a: str, b: str, pattern: str = "*") -> CheckpointComparison:
    """Compare the tensors of two checkpoints whose keys match the pattern (as file names do).

    Raises CheckpointError for a folder that holds no whole checkpoint, and for a pattern that matches no key.
    """
    one, other = _open_both(Path(a), Path(b))
    ranks = [_ranks(side) for side in (one, other)]
    notes = [f"{name} was written at {words}" for name, words in zip("AB", ranks, strict=True) if words]
    keys = list(dict.fromkeys([*one.tensors, *other.tensors]))
    if RANKS in keys and pattern != RANKS:
        keys.remove(RANKS)
    if any(key.startswith("rng.") for key in keys) and ranks[0] != ranks[1]:
        keys = [key for key in keys if not key.startswith("rng.")]
        notes.append("states of random streams belong to ranks of one layout, so they are not compared")
    sides = zip("AB", (one, other), strict=True)
    bare = [name for name, side in sides if all(key.startswith("model.") for key in side.tensors)]
    if len(bare) == 1:
        keys = [key for key in keys if key.startswith("model.")]
        notes.append(f"{bare[0]} holds parameters alone, so nothing else is compared")
    keys = sorted([key for key in keys if fnmatchcase(key, pattern)], key=_kind)
    if not keys:
        raise CheckpointError(a, f"has no tensor to compare that fits {pattern}", next(iter(one.tensors)))
    shared = {*keys} & one.tensors.keys() & other.tensors.keys()
    differ = [key for key in keys if key not in shared or not same(*_in_wider_dtype(one.full(key), other.full(key)))]
    dtypes = {
        tuple(dtype_word(side.tensors[key].properties.dtype) for side in (one, other)) for key in shared & {*keys}
    }
    for of_a, of_b in sorted(pair for pair in dtypes if pair[0] != pair[1]):
        notes.append(f"tensors are {of_a} in A and {of_b} in B: they are compared in the wider dtype")
    return CheckpointComparison(
        kinds=tuple(_likenesses(one, keys, differ)),
        first=_explain(one, other, differ[0]) if differ else None,
        others=tuple(differ[1:]),
        notes=tuple(notes),
    )


def _open_both(a: Path, b: Path) -> tuple[Source, Source]:
    """Both checkpoints in one form. One of another system is brought to the form of the other: its fused or unfused
    linears, and as many rows of the vocabulary.
    """
    found: dict[Path, Source] = {folder: Stored.open(folder) for folder in (a, b) if not is_foreign(folder)}
    fused = any(map(is_megatron, (a, b)))
    form = Form(fuse_qkv=fused, fuse_mlp=fused)
    for stored in found.values():
        keys, table = stored.tensors, stored.tensors.get(_TABLE)
        form = Form(
            fuse_qkv=any(".wqkv." in key for key in keys),
            fuse_mlp=any(".w13." in key for key in keys),
            vocab=table.size[0] if table else 0,
        )
    for folder in sorted({a, b} - found.keys(), key=is_megatron):
        try:
            tensors = parameters(folder, form)
        except CaseError as problem:
            raise CheckpointError(folder, problem.rule, problem.legal) from problem
        found[folder] = Weights(folder=folder, held={f"model.{name}": tensor for name, tensor in tensors.items()})
        if not is_megatron(folder) and _TABLE in found[folder].tensors:
            form = replace(form, vocab=found[folder].tensors[_TABLE].size[0])
    return found[a], found[b]


def _kind(key: str) -> int:
    return next(number for number, (_, fits) in enumerate(_KINDS) if re.match(fits, key))


def _ranks(stored: Source) -> str:
    """The layout at which a checkpoint was written, "" if it does not say."""
    if RANKS not in stored.tensors:
        return ""
    sizes = stored.full(RANKS).tolist()
    return " ".join(f"{axis}={size}" for axis, size in zip(Case().mesh, sizes, strict=False))


def _in_wider_dtype(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(a.dtype, b.dtype)
    return a.to(dtype), b.to(dtype)


def _likenesses(one: Source, keys: Sequence[str], differ: Sequence[str]) -> Iterator[Likeness]:
    for number, (kind, _) in enumerate(_KINDS):
        mine = [key for key in keys if _kind(key) == number]
        if mine:
            elements = sum(one.tensors[key].size.numel() for key in mine if key in one.tensors)
            wrong = sum(key in differ for key in mine)
            yield Likeness(kind=kind, tensors=len(mine), elements=elements, differ=wrong)


def _explain(one: Source, other: Source, key: str) -> Unlike:
    shapes = [{name: tuple(entry.size) for name, entry in side.tensors.items()} for side in (one, other)]
    if key not in shapes[0] or key not in shapes[1]:
        has, lacks = ("A", "B") if key in shapes[0] else ("B", "A")
        return Unlike(
            key=key,
            what=f"{key} is in {has} and not in {lacks}",
            where="the whole tensor",
            error=f"no such tensor in {lacks}",
            pieces=_wrote(has, one if has == "A" else other, key),
            cause=_other_words(key, shapes[has == "A"], has),
        )
    a, b = _in_wider_dtype(one.full(key), other.full(key))
    found = cause(key, a, b, one.full, shapes[0])
    if a.shape != b.shape:
        return Unlike(
            key=key,
            what=f"{key} has another shape",
            where="the whole tensor",
            error=f"{list(a.shape)} in A, {list(b.shape)} in B",
            pieces=f"{_wrote('A', one, key)}; {_wrote('B', other, key)}",
            cause=found,
        )
    wrong = unlike(a, b)
    at = tuple(wrong.nonzero()[0].tolist())
    gap = float((a.double() - b.double()).abs().nan_to_num(torch.inf).max())
    return Unlike(
        key=key,
        what=f"{key} differs",
        where=_where(wrong),
        error=f"{int(wrong.sum()):,} of {wrong.numel():,} elements, by at most {gap:.3g} "
        f"({a[at].item():.6g} in A and {b[at].item():.6g} in B at {list(at)})",
        pieces=f"{_wrote('A', one, key, at)}; {_wrote('B', other, key, at)}",
        cause=found,
    )


def cause(key: str, a: Tensor, b: Tensor, read: Callable[[str], Tensor], shapes: Mapping[str, tuple[int, ...]]) -> str:
    """The cause of finding `b` instead of `a`: padded rows, a transpose, nothing written, another key, a shorter dtype.

    `read` gives the other tensors of A, and `shapes` their shapes. "" if it is none of these.
    """
    few, many = sorted((a, b), key=Tensor.numel)
    if few.dim() and few.shape[1:] == many.shape[1:] and len(few) < len(many) and same(few, many[: len(few)]):
        rows = f"{len(many) - len(few)} rows of the padded vocabulary behind the {len(few)} of its tokens"
        return f"{'B' if many is b else 'A'} kept {rows}" if _VOCABULARY.search(key) else ""
    if a.dim() == 2 and same(a.t(), b):
        return "B is A transposed"
    if not key.startswith("rng.") and not b.any():
        return "B is zero throughout: nothing was written there"
    kind = key.partition(".")[0].replace("optimizer", "model")  # a parameter may be exchanged with its moment
    alike = [name for name, shape in shapes.items() if name != key and shape == tuple(b.shape)]
    for other in alike if bool((b != b.flatten()[:1]).any()) else ():
        if other.partition(".")[0].replace("optimizer", "model") == kind and same(read(other).to(b.dtype), b):
            return f"B holds there what A holds as {other}"
    for dtype in (torch.float16, torch.bfloat16) if a.is_floating_point() else ():
        if same(a.to(dtype).to(a.dtype), b):
            return f"B is A rounded to {dtype_word(dtype)}"
    return ""


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same numbers; NaN is NaN."""
    return a.shape == b.shape and not unlike(a, b).any()


def unlike(a: Tensor, b: Tensor) -> Tensor:
    """A mask of the elements that differ between two tensors of one shape; NaN equals NaN."""
    return (a != b) & ~(a.isnan() & b.isnan()) if a.is_floating_point() else a != b


def _other_words(key: str, shapes: Mapping[str, object], has: str) -> str:
    """The word of the case by which the two models differ, if the keys show one."""
    for part, others, word in ((".wqkv.", ".wq.", "fuse_qkv=true"), (".w13.", ".w1.", "fuse_mlp=true")):
        if part in key and key.replace(part, others) in shapes:
            return f"{has} is of a model with {word}, the other is not"
    return f"{has} has a head of its own (tied=false)" if "head." in key else ""


def _where(wrong: Tensor) -> str:
    """The rows and columns that differ."""
    words = []
    for dim, word in enumerate(("rows", "columns")[: wrong.dim()]):
        hit = wrong.transpose(0, dim).flatten(1).any(1) if wrong.dim() > 1 else wrong
        words.append(f"{_ranges(hit.nonzero().flatten().tolist())} of {len(hit)} {word}")
    return ", ".join(words) if words else "its one number"


def _ranges(numbers: Sequence[int]) -> str:
    """Ranges as text, "0-3 8-11", and how many more follow."""
    kept = set(numbers)
    starts = [number for number in numbers if number - 1 not in kept]
    ends = [number for number in numbers if number + 1 not in kept]
    texts = [str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)]
    return " ".join(texts[:4]) + (f" and {len(texts) - 4} more ranges" if len(texts) > 4 else "")


def _wrote(name: str, stored: Source, key: str, at: tuple[int, ...] = ()) -> str:
    """The rank that wrote the chunk with this element."""
    chunks = stored.chunks(key)
    for (offsets, sizes), file in chunks:
        if not at or all(first <= i < first + size for i, first, size in zip(at, offsets, sizes, strict=True)):
            box = " x ".join(f"{first}-{first + size - 1}" for first, size in zip(offsets, sizes, strict=True))
            rank = re.search(r"__(\d+)_\d+\.distcp", file)
            who = f"rank {rank[1]}" if rank else file
            return f"in {name} {who} wrote {box or 'it'}{' there' if at else ''}, one of {len(chunks)} chunks"
    return f"in {name} it has no elements"
