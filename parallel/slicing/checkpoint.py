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

from parallel.slicing.errors import SliceError
from parallel.slicing.laws import inverse, same_bits
from parallel.slicing.slices import Slice, slices
from parallel.slicing.strided import placed
from parallel.slicing.words import Sliced


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

    Raises SliceError for unreadable files, for shapes that differ from the words, and for a checkpoint without any of
    the slice's tensors.
    """
    made = slices(sliced)
    times = {one.name: 0 for one in made}
    wrong: list[str] = []
    with ExitStack() as stack:
        tensors = _opened(files, stack)
        known: set[str] = set()
        # Longer names first: the last norm's name may end like that of a norm in a layer.
        for one in sorted(made, key=lambda one: -len(one.sources[0])):
            found = list(_prefixes(one, [name for name in tensors if name not in known]))
            times[one.name] = len(found)
            for prefix in found:
                names = [prefix + source for source in one.sources]
                known.update(names)
                whole = _whole(one, names, [tensors[name].get_tensor(name) for name in names])
                parts = [placed(whole, one.place, rank=rank, ranks=sliced.tp) for rank in range(sliced.tp)]
                if not _exact([part for part in parts if part is not None], one, whole):
                    wrong.append(prefix + one.name)
        left_out = sorted(set(tensors) - known)
    if not any(times.values()):
        rule = f"has no tensor of family={sliced.family}, such as {made[0].sources[0]}"
        raise SliceError("check", " ".join(files), rule, "family= of the model in the file")
    return Checked(tensors=len(known), times=times, wrong=tuple(wrong), left_out=tuple(left_out))


def _exact(parts: list[Tensor], one: Slice, whole: Tensor) -> bool:
    try:
        return same_bits(inverse(parts, one.place), whole)
    except SliceError:  # parts of ours that disagree
        return False


def _opened(files: Sequence[str], stack: ExitStack) -> dict[str, Any]:
    """Tensor name -> the open file that has it."""
    try:
        library = importlib.import_module("safetensors")
    except ImportError:
        rule = "is read by the package safetensors, which is not installed"
        raise SliceError("check", files[0], rule, "pip install 'shardproof[checkpoints]'") from None
    tensors: dict[str, Any] = {}
    for file in files:
        if not Path(file).is_file():
            raise SliceError("check", file, "is no file", "check=model.safetensors")
        try:
            opened = stack.enter_context(library.safe_open(file, framework="pt"))
        except (OSError, library.SafetensorError) as problem:
            raise SliceError("check", file, f"is no file of safetensors: {problem}", "model.safetensors") from None
        tensors |= dict.fromkeys(opened.keys(), opened)
    return tensors


def _prefixes(one: Slice, tensors: Sequence[str]) -> Iterator[str]:
    """Prefixes of the names of a slice's sources, one for each layer that has them."""
    found = (name.removesuffix(source) for source in one.sources for name in tensors if _ends(name, source))
    for prefix in dict.fromkeys(found):
        for source in one.sources:
            if prefix + source not in tensors:
                rule = f"is missing, and {one.name} is made of {', '.join(one.sources)}"
                raise SliceError("check", prefix + source, rule, "a whole checkpoint, every one of its files")
        yield prefix


def _ends(name: str, source: str) -> bool:
    return name == source or name.endswith(f".{source}")


def _whole(one: Slice, names: list[str], sources: list[Tensor]) -> Tensor:
    """The tensor of a slice from its sources, end to end, transposed where it is."""
    whole = sources[0] if len(sources) == 1 else torch.cat(sources)
    whole = whole.t().contiguous() if one.transposed and whole.dim() == 2 else whole
    if tuple(whole.shape) != one.place.shape:
        rule = f"has the shape {tuple(whole.shape)} as {one.name}, and the words of the slice say {one.place.shape}"
        raise SliceError(
            "check", " + ".join(names), rule, "hidden, heads, ffn, vocab, positions of the model in the file"
        )
    return whole
