"""Wrong norms of gradients: norms of one rank's parts alone, or with some gradients left out or counted too often.

Whatever its name, a number of the first step is such a norm if its truth is the norm of all gradients. Norms are
computed again from the returned gradients and from the truth's. A guess that leaves an error shows nothing.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence

import torch

from shardproof.harness.checking.measures.kinds import kind_of
from shardproof.harness.checking.records import Evidence, RecordedRun
from shardproof.harness.diagnosing.causes.cause import Cause, claim_cause
from shardproof.harness.diagnosing.causes.hypothesis import OTHER, Failure, Hypothesis
from shardproof.harness.diagnosing.causes.places import blocks_of, held_whole
from shardproof.harness.diagnosing.causes.proofs import Explained
from shardproof.harness.diagnosing.hypotheses.patterns import by_size
from shardproof.harness.mesh_axes import split_axes
from shardproof.harness.verdicts.facts import Fact, state_fact

EXACT = {torch.float64: 1e-9}
"""Relative tolerance of a norm by dtype, if many guesses compete for one number; `_NEAR` for other dtypes."""
_NEAR = 1e-6
_OWN = 5e-4
"""Relative tolerance if every rank has its own norm: several numbers do not fit another rule by chance."""
_LEFT = 1e-3
"""The share of the error that a guess of a norm may leave."""


def from_norms(failure: Failure) -> list[Cause]:
    """Causes of a norm of the first step that counts gradients too often or leaves them out."""
    evidence, name = failure.evidence, failure.first
    squares = {n: float(t.double().square().sum()) for n, t in evidence.truth.tensors.items() if kind_of(n) == "grad"}
    total = math.sqrt(sum(squares.values()))
    truth = evidence.truth.tensors[name].double()
    if not squares or truth.numel() != 1 or not math.isclose(float(truth), total, rel_tol=_NEAR):
        return []
    own = {rank: math.sqrt(square) for rank, square in _own_squares(evidence.run).items()}
    numbers = {rank: float(by[0].local) for rank, by in blocks_of(evidence.run, name).items()}
    value = evidence.run.tensors.get(name)
    if value is None and all(math.isclose(x, own.get(rank, 0.0), rel_tol=_OWN) for rank, x in numbers.items()):
        return _claim_norm(name, total, numbers, own, state_fact("norm_of_parts"))
    for fact, norms in _before_sums(evidence, own):
        if all(math.isclose(x, norms.get(rank, 0.0), rel_tol=_NEAR) for rank, x in numbers.items()):
            return _claim_norm(name, total, numbers, norms, fact)
    if value is None:
        return []
    near = EXACT.get(value.dtype, _NEAR)
    for fact, guess in _counted_otherwise(evidence, squares, own):
        if math.isclose(float(value), guess, rel_tol=near):
            return _claim_norm(name, total, {0: float(value)}, {0: guess}, fact)
    return []


def _claim_norm(
    name: str, truth: float, values: Mapping[int, float], guesses: Mapping[int, float], fact: Fact
) -> list[Cause]:
    """The cause, if these guesses are close enough to the values of the norm."""
    value = torch.tensor([*values.values()], dtype=torch.float64)
    guess = torch.tensor([guesses[rank] for rank in values], dtype=torch.float64)
    proof = Explained(value=value, truth=torch.full_like(value, truth), guess=guess, left=_LEFT, names=(name,))
    return claim_cause("norm_members", fact, proof)


def _own_squares(run: RecordedRun) -> dict[int, float]:
    """Rank -> the sum of squares of the gradients that it returned, partial sums as they are."""
    return {
        rank: sum(
            float(block.local.double().square().sum())
            for name, blocks in outcome.items()
            for block in blocks
            if kind_of(name) == "grad"
        )
        for rank, outcome in enumerate(run.outcomes)
    }


def _before_sums(evidence: Evidence, own: Mapping[int, float]) -> Iterator[tuple[Fact, Mapping[int, float]]]:
    """Every rank's norm of its gradients as backward left them, or of those of the ranks of an axis: (fact, norms).

    Norms that are those of what the ranks returned (`own`) are left out: then no sum followed that a norm could miss.
    """
    for squares in zip(*(one.tolist() for one in evidence.search.unsummed), strict=False):
        alone = {rank: math.sqrt(square) for rank, square in enumerate(squares)}
        if all(math.isclose(norm, own.get(rank, 0.0), rel_tol=_NEAR) for rank, norm in alone.items()):
            continue
        yield state_fact("norm_unsummed", axis=""), alone
        for axis in split_axes(evidence.run.case):
            over = {rank: ranks for ranks in evidence.claims.axes.get(axis, ()) for rank in ranks}
            norms = {rank: math.sqrt(sum(squares[r] for r in ranks)) for rank, ranks in over.items()}
            yield state_fact("norm_unsummed", axis=axis), norms


def _counted_otherwise(
    evidence: Evidence, squares: Mapping[str, float], own: Mapping[int, float]
) -> Iterator[tuple[Fact, float]]:
    """Norms in which gradients are counted differently: (fact, norm).

    A group of gradients is left out, counted once for each rank of an axis, divided by the number of these ranks, or
    counted twice. Or the norm is that of one rank's parts, or of all that the ranks of an axis hold, replicas included.
    Or the norms of two groups are added instead of their squares.
    """
    axes = split_axes(evidence.run.case)
    world = {} if evidence.run.case.world_size in axes.values() else {"all ranks": evidence.run.case.world_size}
    for rank, norm in own.items():
        yield state_fact("norm_of_rank", rank=rank), norm
    total = sum(squares.values())
    for what, names in _groups_of_gradients(evidence, [*squares]).items():
        square = sum(squares[name] for name in names)
        for axis, size in by_size({**axes, **world}):
            alike = {"what": what, "axis": axis, "size": size}
            often = state_fact("counted_often", **alike, one=what.startswith("grad/"))
            yield often, math.sqrt(total + (size - 1) * square)  # as for a tensor with `size` uses
            yield state_fact("counted_one_of", **alike), math.sqrt(max(total + (1 / size - 1) * square, 0.0))
        if len(names) < len(squares):
            yield state_fact("left_out_of_norm", what=what), math.sqrt(max(total - square, 0.0))
            yield state_fact("counted_twice", what=what), math.sqrt(total + square)
            yield state_fact("norms_added", what=what), math.sqrt(square) + math.sqrt(max(total - square, 0.0))
    for axis in (*axes, *world):
        ranks = evidence.claims.axes[axis][0] if axis in axes else tuple(own)
        yield state_fact("counts_replicas", axis=axis), math.hypot(*(own[r] for r in ranks if r in own))


def _groups_of_gradients(evidence: Evidence, names: Sequence[str]) -> dict[str, frozenset[str]]:
    """Groups of gradients that code may treat alike, described in words: by the ranks that hold them, single ones, by
    name, by dims.
    """
    whole = {name for name in names if held_whole(evidence.run, name)}
    groups = {
        "what every rank holds whole": whole,
        "what is split over ranks": {*names} - whole,
        "everything": {*names},
    }
    for axis in split_axes(evidence.run.case):
        lists = evidence.claims.axes.get(axis, ((),))
        alike = {name for name in names if all(_same_part(evidence.run, name, ranks) for ranks in lists)}
        groups[f"what ranks of {axis} hold alike"], groups[f"what is split over {axis}"] = alike, {*names} - alike
        for place in range(len(lists[0])):
            holds = {rank for ranks in lists for rank in ranks[place : place + 1]}
            groups[f"what {axis} rank {place} alone holds"] = {
                name for name in names if set() < {*blocks_of(evidence.run, name)} <= holds
            }
    groups |= {name: {name} for name in names}
    for name in names:
        groups.setdefault(re.sub(r"\.\d+\.", ".*.", name), set()).add(name)
        groups.setdefault(f"every {name.rpartition('.')[2]}", set()).add(name)
        for module in name.removeprefix("grad/").split(".")[:-1]:  # all experts, all attention
            if not module.isdigit():
                groups.setdefault(f"everything in {module}", set()).add(name)
    vectors = {name for name in names if evidence.truth.tensors[name].dim() < 2}
    groups |= {"every vector (norms and biases)": vectors, "every matrix": {*names} - vectors}
    groups |= {"every vector that is split over ranks": vectors - whole, "every vector held whole": vectors & whole}
    first = {frozenset(group): what for what, group in reversed(groups.items()) if group}
    return {what: group for group, what in reversed(first.items())}


def _same_part(run: RecordedRun, name: str, ranks: Sequence[int]) -> bool:
    """Whether all of these ranks that hold a tensor hold the same part of it."""
    blocks = blocks_of(run, name)
    return len({tuple(block.region for block in blocks[rank]) for rank in ranks if rank in blocks}) <= 1


HYPOTHESES = (
    Hypothesis(
        predicts="the norm of the truth's gradients with some counted otherwise, or of one rank's parts",
        causes=from_norms,
        kinds=frozenset({"grad_norm", OTHER}),
    ),
)
