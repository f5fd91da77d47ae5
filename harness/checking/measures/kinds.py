"""The kind of an outcome name, the step in it, and how large the tensors of a kind are together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from harness.checking.measures.distance import blocks_of, groups_of


def kind_of(name: str) -> str:
    """The kind of an outcome name: "grad" of "grad/layers.0.mlp.w1.weight"."""
    return name.partition("/")[0]


def is_state(name: str) -> bool:
    """Whether an outcome name is that of a state after a step: "param_after/0/layers.0.mlp.w1.weight"."""
    return kind_of(name).endswith("_after")


def step_of(name: str) -> int:
    """The step in an outcome name: 3 of "loss/3" and of "param_after/3/head.weight"; -1 when it names none."""
    word = name.partition("/")[2].partition("/")[0]
    return int(word) if word.isdigit() else -1


def kind_rms(truth: Mapping[str, Tensor]) -> dict[str, float]:
    """The rms over all tensors of each kind of name ("grad", "act", ...); tensors that are not finite do not count."""
    kinds: dict[str, dict[str, int]] = {}
    for name, tensor in truth.items():
        if tensor.is_floating_point():
            kinds.setdefault(kind_of(name), {})[name] = tensor.numel()
    found: dict[str, float] = {}
    for kind, sizes in kinds.items():
        sums = [each for names in groups_of(sizes) for each in _squares([truth[name] for name in names])]
        if sums:
            found[kind] = math.sqrt(sum(square for square, _ in sums) / max(sum(count for _, count in sums), 1))
    return found


def _squares(tensors: Sequence[Tensor]) -> list[tuple[float, int]]:
    """Sums of squares, and of how many elements: of all the tensors together, or of each that is finite."""
    if len(tensors) > 1:
        flat = torch.cat([tensor.reshape(-1).double() for tensor in tensors])
        if math.isfinite(square := float(flat.dot(flat))):
            return [(square, flat.numel())]
        return [each for tensor in tensors for each in _squares([tensor])]
    blocks = [block.reshape(-1) for block in blocks_of(tensors[0])]
    square = sum(float(block.dot(block)) for block in map(Tensor.double, blocks))
    finite = math.isfinite(square) or all(bool(torch.isfinite(block).all()) for block in blocks)
    return [(square, tensors[0].numel())] if finite else []
