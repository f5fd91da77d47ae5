"""Gradient norms gone wrong: what they count too often or leave out, and norms of another kind.

A norm of the first step is built again from the truth's gradients: with some of them counted otherwise, or by another
rule than the root of the sum of squares. Tested on numbers: a fit that leaves an error shows nothing.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from harness.checking.evidence import Evidence, split_axes
from harness.checking.measures.tolerance import kind_of
from harness.diagnosing.rules.causes import Cause, claimed
from harness.diagnosing.rules.places import blocks_of
from harness.diagnosing.rules.proofs import Explained, number

__all__ = ["from_norms"]

CLOSE = 1e-3
"""Norms are taken for equal within this share of themselves; what many guesses may meet within its square."""
LEFT = 1e-2
"""Share of the error that a rule for norms may leave of it."""


def from_norms(evidence: Evidence, name: str) -> list[Cause]:
    """What the norm of the first step counts too often or leaves out."""
    squares = {n: float(t.double().square().sum()) for n, t in evidence.truth.items() if kind_of(n) == "grad"}
    if name != "grad_norm/0" or not squares:
        return []
    value = evidence.merged.tensors.get(name)
    if value is None:
        return _own_norms(evidence, name)
    is_norm = partial(_norm, value, evidence.truth[name])
    for added in _norms_added(evidence):
        words = "it is the sum of the norms of the ranks' parts: the root is taken before the sum of the squares"
        if said := is_norm("norm_of_norms", words, added):
            return said
    for known, words, other in _kinds(evidence, name):
        if said := is_norm(known, words, other):
            return said
    whole = sum(square for n, square in squares.items() if _held_whole(evidence, n))
    split, found = sum(squares.values()) - whole, float(value) ** 2
    for known, words, square in (*_counted_by_axis(evidence, whole, split), *_one_otherwise(squares, whole, split)):
        if said := is_norm(known, words, math.sqrt(max(square, 0.0))):
            return said
    others = {f"{name} beyond the first rank's part": square for name, square in _beyond_first(evidence).items()}
    missing = _several_left_out({**squares, **others}, whole + split - found, evidence.case.dtype)
    words = f"it leaves out {', '.join(missing)}"
    return is_norm("norm_counts_few", words, math.sqrt(whole + split - sum(missing.values()))) if missing else []


def _norm(value: Tensor, truth: Tensor, known: str, words: str, guess: float) -> list[Cause]:
    """The cause when the norm is this number."""
    if not math.isclose(float(value), guess, rel_tol=CLOSE**2):
        return []
    return claimed(known, words, Explained(value=value, truth=truth, guess=number(guess).view_as(truth), left=LEFT))


def _one_otherwise(squares: Mapping[str, float], whole: float, split: float) -> Iterator[tuple[str, str, float]]:
    """Sums of squares in which one part is left out or counted twice: (cause, words, sum)."""
    for square, what in (
        (whole, "what every rank holds whole"),
        (split, "what is split over ranks"),
        *((square, name) for name, square in squares.items()),
    ):
        yield "norm_counts_few", f"it leaves out {what}", whole + split - square
    for name, square in squares.items():
        yield "norm_counts_replicas", f"it counts {name} twice", whole + split + square


def _kinds(evidence: Evidence, name: str) -> Iterator[tuple[str, str, float]]:
    """What another rule would give for the norm of these gradients, and what that would mean: (cause, words, norm)."""
    gradients = [tensor.double().flatten() for n, tensor in evidence.truth.items() if kind_of(n) == "grad"]
    right, norms = float(evidence.truth[name]), [float(gradient.norm()) for gradient in gradients]
    for words, other in {
        "it is the sum of squares: the root is not taken": right**2,
        "it is the largest element: a maximum in place of the root of the sum of squares": max(
            float(gradient.abs().max()) for gradient in gradients
        ),
        "it is the sum of magnitudes in place of the root of the sum of squares": sum(
            float(gradient.abs().sum()) for gradient in gradients
        ),
        "it is the norm of the parameter with the largest one": max(norms),
        "it is the root of the mean of squares, not of their sum": right / math.sqrt(sum(map(len, gradients))),
    }.items():
        yield "norm_kind", words, other
    yield "norm_of_norms", "it is the sum of the norms of all parameters, not of their squares", sum(norms)
    largest = getattr(evidence.case, "clip", 0.0)
    if 0 < largest < right:
        words = f"it is clip={largest:g}: the norm of what clipping left, reported in place of the one before"
        yield "norm_after_clip", words, largest * right / (right + 1e-6)
        yield "norm_after_clip", words, largest


def _counted_by_axis(evidence: Evidence, whole: float, split: float) -> Iterator[tuple[str, str, float]]:
    """Sums of squares that are counted once a rank of an axis, or divided by its ranks, all or one kind alone: (cause,
    words, sum).
    """
    all_of_it = "what every rank holds whole", "what is split over ranks", "everything"
    for axis, size in split_axes(evidence.case).items():
        counts = ((size, 1), (1, size), (size, size))
        for (of_whole, of_split), what in zip(counts, all_of_it, strict=True):
            words = f"it counts {what} once a rank, {axis}={size}"
            yield "norm_counts_replicas", words, whole * of_whole + split * of_split
            words = f"it counts 1 of {size} ranks of {axis} in {what}"
            yield "norm_counts_few", words, whole / of_whole + split / of_split


def _norms_added(evidence: Evidence) -> Iterator[float]:
    """Sums of norms over the ranks of a group, what every rank holds whole counted by the first."""
    for groups in evidence.case.axes.values():
        ranks = groups[0] if groups else ()
        norms = []
        for place, rank in enumerate(ranks):
            names = [n for n in evidence.outcomes[rank] if kind_of(n) == "grad"]
            counted = [n for n in names if place == 0 or not _held_whole(evidence, n)]
            blocks = [block.local.double() for n in counted for block in evidence.outcomes[rank][n]]
            norms.append(math.sqrt(sum(float(block.square().sum()) for block in blocks)))
        if len(norms) > 1:
            yield sum(norms)


def _beyond_first(evidence: Evidence) -> dict[str, float]:
    """Split gradients -> the squares of all parts but the first rank's."""
    found: dict[str, float] = {}
    for name in evidence.truth:
        first = blocks_of(evidence, name).get(0, ()) if kind_of(name) == "grad" else ()
        if first and not _held_whole(evidence, name):
            mine = sum(float(block.local.double().square().sum()) for block in first)
            found[name] = float(evidence.truth[name].double().square().sum()) - mine
    return found


def _several_left_out(squares: Mapping[str, float], left_out: float, dtype: str) -> dict[str, float]:
    """The fewest kinds of parameters, each in all layers, whose squares are what is missing, with these squares."""
    kinds: dict[str, float] = {}
    for name, square in squares.items():
        kind = re.sub(r"\.\d+\.", ".*.", name)
        kinds[kind] = kinds.get(kind, 0.0) + square
    if dtype != "float64" or left_out <= 0:  # so many sums that one of them comes near by chance
        return {}
    for count in range(1, 5):
        for some in itertools.combinations(kinds, count):
            if math.isclose(sum(kinds[kind] for kind in some), left_out, rel_tol=1e-9):
                return {kind: kinds[kind] for kind in some}
    return {}


def _held_whole(evidence: Evidence, name: str) -> bool:
    return all(
        sum(part.local.numel() for part in parts) == math.prod(parts[0].global_shape)
        for parts in blocks_of(evidence, name).values()
    )


def _own_norms(evidence: Evidence, name: str) -> list[Cause]:
    """Whether every rank's norm is that of its own parts alone."""
    values, guesses = [], []
    for rank, by in blocks_of(evidence, name).items():
        mine = [b for n, parts in evidence.outcomes[rank].items() if kind_of(n) == "grad" for b in parts]
        square = sum(float(block.local.double().square().sum()) for block in mine)
        values.append(float(by[0].local))
        guesses.append(math.sqrt(square))
    if not all(math.isclose(x**2, y**2, rel_tol=CLOSE) for x, y in zip(values, guesses, strict=True)):
        return []
    value, guess = torch.tensor(values).double(), torch.tensor(guesses).double()
    own = Explained(value=value, truth=evidence.truth[name].double().expand_as(value), guess=guess, left=LEFT)
    return claimed("norm_counts_few", "each rank's norm is that of its own parts: it was never summed", own)
