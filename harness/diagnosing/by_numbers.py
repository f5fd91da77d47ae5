"""Causes by the numbers of the first wrong tensors: each kind of tensor has rules of its own, tried in order.

A bug has one first place: tensors of the same kind and step are looked at together, what comes later follows.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from harness.checking.evidence import Evidence
from harness.checking.measures.kinds import is_state, kind_of
from harness.diagnosing.rules.causes import Cause, reported
from harness.diagnosing.rules.displaced import from_offsets, from_regions
from harness.diagnosing.rules.factors import from_factor
from harness.diagnosing.rules.norms import from_norms
from harness.diagnosing.rules.optimizer.steps import from_states
from harness.diagnosing.rules.optimizer.updates import from_start, from_updates
from harness.diagnosing.rules.patterns import drift, from_patterns, not_finite, partial_sums, rounded
from harness.diagnosing.rules.places import blocks_of, place_of, wrong_ranks
from harness.diagnosing.rules.sum_terms import added, from_terms
from harness.diagnosing.rules.sums import from_counts, from_losses, from_shares
from harness.mesh_axes import split_axes

THROUGHOUT = 0.9
"""Share of a shard's elements that are wrong when the shard is."""


def by_numbers(evidence: Evidence, wrong: Sequence[str]) -> list[Cause]:
    """Causes by the first wrong tensors. Logits of a later step follow from the parameters before them.

    Masks give no cause. Initial values give no `other_shard`: shards that are drawn alike look so too.
    """
    kind = kind_of(wrong[0])
    causes = [] if kind == "mask" else _by_kind(evidence, wrong)
    if kind == "init":
        causes = [cause for cause in causes if cause.id != "other_shard"]
        return [replace(cause, words=f"initial values, before any step: {cause.words}") for cause in causes]
    return causes


def in_other_places(evidence: Evidence, name: str) -> list[Cause]:
    """Causes of right numbers that stand in wrong places; none for a tensor without a truth."""
    value, truth = evidence.merged.tensors.get(name), evidence.truth.get(name)
    if truth is None:
        return []
    return ([] if value is None else _of_places(evidence, name, value, truth)) or from_regions(evidence, name)


def _by_kind(evidence: Evidence, wrong: Sequence[str]) -> list[Cause]:
    first, kind = wrong[0], kind_of(wrong[0])
    if kind in ("logits", "loss", "grad_norm") and not first.endswith("/0") and evidence.states is None:
        return from_updates(evidence, _of_kind(wrong, "param"))
    alike = _of_kind(wrong, kind)
    torn = [name for name in alike if name not in evidence.merged.tensors]
    if first in torn and (causes := _of_replicas(evidence, torn)):
        return causes
    if kind in ("loss", "act_grad", "grad") and (causes := from_shares(evidence, _of_kind(wrong, "grad"))):
        return causes
    if kind == "loss" and (causes := from_losses(evidence, first) or _of_numbers(evidence, alike)):
        return causes
    if kind == "loss" and "tokens/0" in wrong:  # a loss is divided by them
        return _of_tokens(evidence, wrong)
    if kind == "grad_norm":
        causes = from_norms(evidence, first) or _of_numbers(evidence, alike)
        value = evidence.merged.tensors.get(first)
        if not causes and value is not None:  # perhaps that of another step
            causes = from_patterns(value, evidence.truth[first], {}, _neighbours(evidence, first))
        return causes or from_states(evidence, wrong)
    if kind == "tokens":
        return _of_tokens(evidence, wrong)
    if is_state(first) or kind == "param":
        value = evidence.merged.tensors.get(first)
        causes = [] if value is None else rounded(value, evidence.truth[first])
        return causes or from_states(evidence, wrong) or from_updates(evidence, _of_kind(wrong, "param"))
    causes = _of_values(evidence, alike if kind == "grad" else alike[:1])
    if not causes and kind == "act":  # a weight may have been wrong from the start
        own = f"param/{place_of(first, 1).module}."
        return from_start(evidence, sorted(wrong, key=lambda name: not name.startswith(own)))
    return causes


def _of_numbers(evidence: Evidence, alike: Sequence[str]) -> list[Cause]:
    """Causes of a factor on the numbers of all wrong steps, else of one on the first that is a size of the case.

    A constant factor that implies another whole number of tokens is left out: tokens may be counted otherwise.
    """
    causes = from_factor(evidence, alike)
    first = evidence.merged.tensors.get(alike[0])
    if causes and causes[0].id == "constant_factor" and first is not None and "tokens" in evidence.shares:
        count = float(evidence.shares["tokens"].sum() * evidence.truth[alike[0]].double() / first.double())
        causes = [] if math.isclose(count, round(count), rel_tol=1e-6) else causes
    return causes or from_factor(evidence, alike[:1])


def _of_tokens(evidence: Evidence, wrong: Sequence[str]) -> list[Cause]:
    counts = _of_kind(wrong, "tokens")
    return from_counts(evidence, counts[0]) or from_factor(evidence, counts[:1])


def _of_kind(names: Iterable[str], kind: str) -> list[str]:
    return [name for name in names if kind_of(name) == kind]


def _of_replicas(evidence: Evidence, torn: Sequence[str]) -> list[Cause]:
    """The causes of values that differ between ranks which must hold the same.

    A tensor whose truth is next to nothing shows no cause, so each is looked at until one does.
    """
    axes = {axis: evidence.axes[axis] for axis in split_axes(evidence.case) if axis in evidence.axes}
    for name in torn:
        mine = {rank: by[0].local for rank, by in blocks_of(evidence, name).items()}
        truth = evidence.truth[name]
        causes = not_finite(mine, truth) or drift(mine, truth) or partial_sums(mine, truth, axes)
        if causes := causes or from_norms(evidence, name):
            return causes
    return from_shares(evidence, _of_kind(evidence.truth, "grad")) or from_losses(evidence, torn[0])


def _of_values(evidence: Evidence, names: Sequence[str]) -> list[Cause]:
    """Causes of wrong values: a factor on all of them, rounded, a term too few, right numbers in other places."""
    known = [name for name in names if name in evidence.merged.tensors]
    if not known:
        return []
    evidence, first, truth = _as_judged(evidence, known), known[0], evidence.truth[known[0]]
    value = evidence.merged.tensors[first]
    causes = from_factor(evidence, known) or rounded(value, truth) or from_terms(evidence, first)
    causes = causes or from_offsets(evidence, known) or in_other_places(evidence, first) or _one_shard(evidence, first)
    return causes or [cause for cause in from_factor(evidence, known[:1]) if cause.follows]


def _as_judged(evidence: Evidence, names: Sequence[str]) -> Evidence:
    """The evidence with these tensors in the dtype whose limits hold for them, where they are kept in a wider one."""
    dtypes = {name: getattr(torch, evidence.dtype_of(name)) for name in names}
    tensors = {name: evidence.merged.tensors[name] for name in names if evidence.truth[name].is_floating_point()}
    wider = {n: t.to(dtypes[n]) for n, t in tensors.items() if torch.finfo(t.dtype).eps < torch.finfo(dtypes[n]).eps}
    merged = replace(evidence.merged, tensors={**evidence.merged.tensors, **wider})
    return replace(evidence, merged=merged) if wider else evidence


def _of_places(evidence: Evidence, name: str, value: Tensor, truth: Tensor) -> list[Cause]:
    """Whether the right numbers stand in wrong places, perhaps beside what a module itself adds."""
    axes, others = split_axes(evidence.case), _neighbours(evidence, name)
    if kind_of(name) == "logits":
        axes |= {"data ranks and micro-batches": axes.get("dp", 1) * evidence.case.micro}
    causes = from_patterns(value, truth, axes, others)
    if causes or kind_of(name) != "act" or not (terms := added(evidence, name)):
        return causes
    own = sum(terms.values())
    return from_patterns((value.double() - own).to(value.dtype), truth.double() - own, axes, {})


def _one_shard(evidence: Evidence, name: str) -> list[Cause]:
    """Whether a gradient that is cut over an axis is wrong at one place of that axis alone, and all over that part.

    An activation's part is a matter of whose tokens are wrong, which is reported beside its place.
    """
    if kind_of(name) != "grad":
        return []
    wrong, blocks = set(wrong_ranks(evidence, name)), blocks_of(evidence, name)
    for axis, size in split_axes(evidence.case).items():
        places = [{ranks[place] for ranks in evidence.axes[axis]} for place in range(size)]
        cut = len({tuple(block.region for block in blocks[rank]) for rank in evidence.axes[axis][0] if rank in blocks})
        if cut == size and wrong in places:
            truth = evidence.truth[name].double()
            gaps = ((x.local.double() - x.part_of(truth)).abs() for rank in wrong for x in blocks[rank])
            off = [gap > 1e-6 * float(truth.square().mean().sqrt()) for gap in gaps if gap.numel()]
            if all(float(one.double().mean()) >= THROUGHOUT for one in off):  # some rows are no shard
                words = f"only part {places.index(wrong)} of {size} over {axis} is wrong, and nearly all of it"
                return [reported("one_shard", words, wrong)]
    return []


def _neighbours(evidence: Evidence, name: str) -> dict[str, Tensor]:
    """Truths of the same kind and another step: what a stale tensor would equal."""
    kind, _, rest = name.partition("/")
    alike = [other for other in evidence.truth if rest.isdigit() and other != name and kind_of(other) == kind]
    return {other: evidence.truth[other] for other in alike}
