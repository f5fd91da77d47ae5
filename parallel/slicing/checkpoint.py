"""A checkpoint in files of safetensors: every tensor that a slice knows is cut for all ranks and put together again.

Only the tensors of one slice of one layer are in memory at a time. The library reads the files, so any dtype of torch
is fine; bits are compared, not numbers.
"""

import importlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardproof.parallel.communication.layout import Placement, gather, meshgrid, pieces, shard
from shardproof.parallel.slicing.rows import count_holders
from shardproof.parallel.slicing.slices import Slice, slices
from shardproof.parallel.slicing.words import Sliced
from shardproof.reference.errors import CaseError


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A checkpoint under a slice.

    tensors    how many tensors of the checkpoint were cut and joined
    times      slice -> how often it was found (once a layer); 0: the checkpoint has none
    wrong      names of those that were not the same after cutting and joining
    left_out   names of tensors of the checkpoint that no slice is about
    """

    tensors: int
    times: dict[str, int]
    wrong: tuple[str, ...]
    left_out: tuple[str, ...]


def check(sliced: Sliced, files: Sequence[str]) -> Checked:
    """Cut and join all tensors of these files.

    Raises CaseError for unreadable files, for shapes that differ from the words, and for a checkpoint without any of
    the slice's tensors.
    """
    made = slices(sliced)
    times = {one.name: 0 for one in made}
    wrong: list[str] = []
    with ExitStack() as stack:
        tensors = _open_files(files, stack)
        known: set[str] = set()
        # Longer names first: the last norm's name may end as that of a layer's norm does.
        for one in sorted(made, key=lambda one: -len(one.sources[0])):
            found = list(_prefixes(one, [name for name in tensors if name not in known]))
            times[one.name] = len(found)
            for prefix in found:
                names = [prefix + source for source in one.sources]
                known.update(names)
                whole = _assemble(one, names, [tensors[name].get_tensor(name) for name in names])
                parts = [shard(whole, one.place, at) for at in meshgrid({"tp": sliced.tp})]
                try:
                    exact = same_bits(inverse(parts, one.place), whole)
                except CaseError:  # our own parts disagree
                    exact = False
                wrong += [] if exact else [prefix + one.name]
        left_out = sorted(set(tensors) - known)
    if not any(times.values()):
        rule = f"has no tensor of family={sliced.family}, such as {made[0].sources[0]}"
        raise CaseError("check", " ".join(files), rule, "family= of the model in the file")
    return Checked(tensors=len(known), times=times, wrong=tuple(wrong), left_out=tuple(left_out))


def inverse(parts: Sequence[Tensor], place: Placement) -> Tensor:
    """The whole tensor from the parts of all ranks, in their order.

    Raises CaseError when parts that hold the same elements differ, or some elements lie on no rank.
    """
    for cut in place.cuts:
        lost = count_holders(cut.held, place.shape[cut.dim or 0]).count(0)
        if lost:
            raise CaseError("held", f"{lost} elements", "lie on no rank", "parts that hold every element")
    ranks = meshgrid({"tp": len(parts)})
    whole = gather(zip(ranks, parts, strict=True), place)
    for rank, part in enumerate(parts):
        for piece in pieces(part, place, ranks[rank]):
            box = tuple(slice(at, at + n) for at, n in zip(piece.offsets, piece.local.shape, strict=True))
            if not same_bits(whole[box], piece.local):
                raise CaseError("parts", f"rank {rank}", "differs from another rank's copy", "equal copies")
    return whole


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bits, NaN and the sign of zero included."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(*(x.contiguous().view(-1).view(torch.uint8) for x in (a, b)))


def _open_files(files: Sequence[str], stack: ExitStack) -> dict[str, Any]:
    """Tensor name -> the open file that has it."""
    try:
        library = importlib.import_module("safetensors")
    except ImportError:
        rule = "is read by the package safetensors, which is not installed"
        raise CaseError("check", files[0], rule, "pip install 'shardproof[checkpoints]'") from None
    tensors: dict[str, Any] = {}
    for file in files:
        if not Path(file).is_file():
            raise CaseError("check", file, "is no file", "check=model.safetensors")
        try:
            opened = stack.enter_context(library.safe_open(file, framework="pt"))
        except (OSError, library.SafetensorError) as problem:
            raise CaseError("check", file, f"is no file of safetensors: {problem}", "model.safetensors") from None
        tensors |= dict.fromkeys(opened.keys(), opened)
    return tensors


def _prefixes(one: Slice, tensors: Sequence[str]) -> Iterator[str]:
    """The prefixes of the names of a slice's sources, one for each layer that has the slice."""
    names = ((name, source) for source in one.sources for name in tensors)
    found = (name.removesuffix(source) for name, source in names if f".{name}".endswith(f".{source}"))
    for prefix in dict.fromkeys(found):
        for source in one.sources:
            if prefix + source not in tensors:
                rule = f"is missing, and {one.name} is made of {', '.join(one.sources)}"
                raise CaseError("check", prefix + source, rule, "a whole checkpoint, every one of its files")
        yield prefix


def _assemble(one: Slice, names: list[str], sources: list[Tensor]) -> Tensor:
    """The tensor of a slice: its sources end to end, transposed if the slice is."""
    whole = sources[0] if len(sources) == 1 else torch.cat(sources)
    whole = whole.t().contiguous() if one.transposed and whole.dim() == 2 else whole
    if tuple(whole.shape) != one.place.shape:
        rule = f"has the shape {tuple(whole.shape)} as {one.name}, and the words of the slice say {one.place.shape}"
        raise CaseError(
            "check", " + ".join(names), rule, "hidden, heads, ffn, vocab, positions of the model in the file"
        )
    return whole
