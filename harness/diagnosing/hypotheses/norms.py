"""Gradient norms gone wrong: what they count too often or leave out, and norms of another kind.

A norm of the first step is built again from the truth's gradients. Some are counted otherwise, or the rule is another
than the root of the sum of squares. Tested on numbers: a fit that leaves an error shows nothing.
"""

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from shardproof.harness.checking.evidence import Evidence
from shardproof.harness.checking.measures.kinds import kind_of
from shardproof.harness.diagnosing.causes.cause import Cause, claimed
from shardproof.harness.diagnosing.causes.hypothesis import Hypothesis
from shardproof.harness.diagnosing.causes.places import blocks_of, held_whole
from shardproof.harness.diagnosing.causes.proofs import Explained, number
from shardproof.harness.diagnosing.hypotheses.patterns import by_size
from shardproof.harness.mesh_axes import split_axes

CLOSE = 1e-3
"""Relative tolerance of each rank's squared norm; its square where many guesses compete for one norm."""
EXACT = 1e-9
"""Relative tolerance of these guesses in float64."""
LEFT = 1e-3
"""Share of the error that a guess of a norm may leave of it."""


def from_norms(evidence: Evidence, name: str) -> list[Cause]:
    """Causes of a norm of the first step that counts gradients too often or leaves them out."""
    squares = {n: float(t.double().square().sum()) for n, t in evidence.truth.items() if kind_of(n) == "grad"}
    if name != "grad_norm/0" or not squares:
        return []
    value = evidence.merged.tensors.get(name)
    if value is None:
        return _own_norms(evidence, name)
    is_norm = partial(_norm, name, value, evidence.truth[name])
    others = (_norms_added(evidence), _other_norms(evidence, name), _counted_otherwise(evidence, squares))
    for known, words, other in itertools.chain(*others):
        if causes := is_norm(known, words, other):
            return causes
    total = sum(squares.values())
    beyond = {f"{name} beyond the first rank's part": square for name, square in _beyond_first(evidence).items()}
    missing = _several_left_out({**squares, **beyond}, total - float(value.double().square()), evidence.case.dtype)
    words = f"it leaves out {', '.join(missing)}"
    return is_norm("norm_counts_few", words, math.sqrt(total - sum(missing.values()))) if missing else []


def _norm(name: str, value: Tensor, truth: Tensor, known: str, words: str, guess: float) -> list[Cause]:
    """The cause when the norm is this number."""
    if not math.isclose(float(value), guess, rel_tol=EXACT if value.dtype == torch.float64 else CLOSE**2):
        return []
    is_guess = Explained(value=value, truth=truth, guess=number(guess).view_as(truth), left=LEFT, names=(name,))
    return claimed(known, words, is_guess)


def _counted_otherwise(evidence: Evidence, squares: Mapping[str, float]) -> Iterator[tuple[str, str, float]]:
    """Norms in which one group of gradients is counted otherwise: (cause, words, norm).

    The group is left out, counted once a rank of an axis, divided by these ranks, or counted twice.
    """

    def root(square: float) -> float:
        return math.sqrt(max(square, 0.0))

    total = sum(squares.values())
    axes = split_axes(evidence.case)
    world = {} if evidence.case.world_size in axes.values() else {"all ranks": evidence.case.world_size}
    for what, names in _groups(evidence, [*squares]).items():
        square = sum(squares[name] for name in names)
        for axis, size in by_size({**axes, **world}):
            often = f"{size} times, and {axis}={size}" if what.startswith("grad/") else f"once a rank, {axis}={size}"
            words = f"it counts {what} {often}"  # of one parameter it may be as many uses as well
            yield "norm_counts_replicas", words, root(total + (size - 1) * square)
            words = f"it counts 1 of {size} ranks of {axis} in {what}"
            yield "norm_counts_few", words.replace("ranks of all ranks", "ranks"), root(total + (1 / size - 1) * square)
        if len(names) < len(squares):
            yield "norm_counts_few", f"it leaves out {what}", root(total - square)
            yield "norm_counts_replicas", f"it counts {what} twice", root(total + square)


def _groups(evidence: Evidence, names: Sequence[str]) -> dict[str, frozenset[str]]:
    """Gradients that code may count alike, in words: by who holds what of them, one by one, by kind, by dims."""
    whole = {name for name in names if held_whole(evidence, name)}
    groups = {
        "what every rank holds whole": whole,
        "what is split over ranks": {*names} - whole,
        "everything": {*names},
    }
    for axis in split_axes(evidence.case):
        lists = evidence.axes.get(axis, ((),))
        alike = {name for name in names if all(_same_part(evidence, name, ranks) for ranks in lists)}
        groups[f"what ranks of {axis} hold alike"], groups[f"what is split over {axis}"] = alike, {*names} - alike
        for place in range(len(lists[0])):
            holds = {rank for ranks in lists for rank in ranks[place : place + 1]}
            alone = {n for n in names if set() < {*blocks_of(evidence, n)} <= holds}
            groups[f"what {axis} rank {place} alone holds"] = alone
    groups |= {name: {name} for name in names}
    for name in names:
        groups.setdefault(re.sub(r"\.\d+\.", ".*.", name), set()).add(name)
        groups.setdefault(f"every {name.rpartition('.')[2]}", set()).add(name)
    vectors = {name for name in names if evidence.truth[name].dim() < 2}
    groups |= {"every vector (norms and biases)": vectors, "every matrix": {*names} - vectors}
    first = {frozenset(group): what for what, group in reversed(groups.items()) if group}
    return {what: group for group, what in reversed(first.items())}


def _other_norms(evidence: Evidence, name: str) -> Iterator[tuple[str, str, float]]:
    """Norms of these gradients by other rules, and what they would mean: (cause, words, norm)."""
    gradients = [tensor.double().flatten() for n, tensor in evidence.truth.items() if kind_of(n) == "grad"]
    right, norms = float(evidence.truth[name]), [float(gradient.norm()) for gradient in gradients]
    largest, total = max(float(g.abs().max()) for g in gradients), sum(float(g.abs().sum()) for g in gradients)
    for words, other in {
        "it is the sum of squares, and not its root": right**2,
        "it is the largest magnitude of an element": largest,
        "it is the sum of magnitudes": total,
        "it is the norm of the parameter with the largest one": max(norms),
        "it is the root of the mean of squares, not of their sum": right / math.sqrt(sum(map(len, gradients))),
    }.items():
        yield "norm_kind", words, other
    yield "norm_of_norms", "it is the sum of the norms of all parameters, not of their squares", sum(norms)
    clip = getattr(evidence.case, "clip", 0.0)
    if 0 < clip < right:
        words = f"it is clip={clip:g}: the norm of what clipping leaves"
        yield "norm_after_clip", words, clip * right / (right + 1e-6)
        yield "norm_after_clip", words, clip


def _norms_added(evidence: Evidence) -> Iterator[tuple[str, str, float]]:
    """Sums of norms over the ranks of a group, what every rank holds whole counted by the first."""
    words = "it is the sum of the norms of the ranks' parts"
    for groups in evidence.axes.values():
        ranks = groups[0] if groups else ()
        norms = []
        for place, rank in enumerate(ranks):
            names = [n for n in evidence.outcomes[rank] if kind_of(n) == "grad"]
            counted = [n for n in names if place == 0 or not held_whole(evidence, n)]
            blocks = [block.local.double() for n in counted for block in evidence.outcomes[rank][n]]
            norms.append(math.sqrt(sum(float(block.square().sum()) for block in blocks)))
        if len(norms) > 1:
            yield "norm_of_norms", words, sum(norms)
            yield "norm_of_norms", words.replace("the sum", "the root of the sum", 1), math.sqrt(sum(norms))


def _beyond_first(evidence: Evidence) -> dict[str, float]:
    """Split gradients -> the squares of all parts but the first rank's."""
    found: dict[str, float] = {}
    for name in evidence.truth:
        first = blocks_of(evidence, name).get(0, ()) if kind_of(name) == "grad" else ()
        if first and not held_whole(evidence, name):
            mine = sum(float(block.local.double().square().sum()) for block in first)
            found[name] = float(evidence.truth[name].double().square().sum()) - mine
    return found


def _several_left_out(squares: Mapping[str, float], left_out: float, dtype: str) -> dict[str, float]:
    """The fewest kinds of parameters, each in all layers, whose squares are what is missing, with these squares."""
    kinds: dict[str, float] = {}
    for name, square in squares.items():
        kind = re.sub(r"\.\d+\.", ".*.", name)
        kinds[kind] = kinds.get(kind, 0.0) + square
    if dtype != "float64" or left_out <= 0:  # in shorter dtypes one of the many sums fits by chance
        return {}
    for count in range(1, 5):
        for some in itertools.combinations(kinds, count):
            if math.isclose(sum(kinds[kind] for kind in some), left_out, rel_tol=1e-9):
                return {kind: kinds[kind] for kind in some}
    return {}


def _same_part(evidence: Evidence, name: str, ranks: Sequence[int]) -> bool:
    """Whether these ranks, as far as they hold it, hold the same part of a tensor."""
    blocks = blocks_of(evidence, name)
    return len({tuple(block.region for block in blocks[rank]) for rank in ranks if rank in blocks}) <= 1


def _own_norms(evidence: Evidence, name: str) -> list[Cause]:
    """Whether every rank's norm is that of its own parts alone."""
    values, guesses = [], []
    for rank, by in blocks_of(evidence, name).items():
        mine = [b for n, parts in evidence.outcomes[rank].items() if kind_of(n) == "grad" for b in parts]
        square = sum(float(block.local.double().square().sum()) for block in mine)
        values.append(float(by[0].local))
        guesses.append(math.sqrt(square))
    if not all(math.isclose(x, y, rel_tol=CLOSE / 2) for x, y in zip(values, guesses, strict=True)):
        return []
    value, guess = torch.tensor(values).double(), torch.tensor(guesses).double()
    truth = evidence.truth[name].double().expand_as(value)
    own = Explained(value=value, truth=truth, guess=guess, left=LEFT, names=(name,))
    return claimed("norm_counts_few", "each rank's norm is that of its own parts", own)


HYPOTHESES = (
    Hypothesis(
        predicts="the norm of the truth's gradients with some counted otherwise, or by another rule",
        causes=lambda failure: from_norms(failure.evidence, failure.first),
        kinds=frozenset({"grad_norm"}),
    ),
)
