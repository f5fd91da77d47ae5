"""Right numbers in wrong places: patterns of a whole tensor, another rank's part, and another tensor's numbers.

Each rank's blocks are compared with the truth at the places where other ranks' blocks begin. So parts of unequal size,
and a shorter last part, are found too.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from shardproof.harness.checking.measures.kinds import is_state, kind_of, step_of
from shardproof.harness.checking.records import RecordedRun, Truth
from shardproof.harness.diagnosing.causes.cause import Cause, claim_cause
from shardproof.harness.diagnosing.causes.hypothesis import LATER, STATE, VALUES, Failure, Hypothesis, of_values
from shardproof.harness.diagnosing.causes.places import blocks_of, is_comparable
from shardproof.harness.diagnosing.causes.proofs import FEWEST, FEWEST_OF_A_FACTOR, Explained, share_left
from shardproof.harness.diagnosing.hypotheses.patterns import CLOSE, MOST_ROWS, from_patterns
from shardproof.harness.mesh_axes import split_axes
from shardproof.harness.outcome.blocks import Block
from shardproof.harness.verdicts.facts import state_fact

OVERLAP = 0.5
"""The share of a part that must still lie inside the tensor when the part is moved to the other place."""


def from_regions(run: RecordedRun, truth: Truth, name: str) -> list[Cause]:
    """Whether every wrong block of a tensor holds the numbers of another place along one dim."""
    if not is_comparable(run, truth, name):
        return []
    blocks = [(rank, block) for rank, of_rank in blocks_of(run, name).items() for block in of_rank]
    true = truth.tensors[name].double()
    for dim in range(true.dim()):
        starts = sorted({block.region[dim][0] for _, block in blocks})
        wrong = [(rank, block) for rank, block in blocks if _is_wrong(block, true)]
        places = [there for _, block in wrong if (there := _find_elsewhere(name, block, dim, starts, true))]
        if len(starts) > 1 and wrong and len(places) == len(wrong):
            (rank, block), (start, _) = wrong[0], places[0]
            fact = state_fact("at_other_place", dim=dim, rank=rank, start=start, right=block.region[dim][0])
            return claim_cause("other_part", fact, *(moved for _, moved in places))
    return []


def _is_wrong(block: Block, truth: Tensor) -> bool:
    true = block.part_of(truth)
    return float((block.local.double() - true).norm()) > share_left(block.local) * float(true.norm())


def _find_elsewhere(
    name: str, block: Block, dim: int, starts: Sequence[int], truth: Tensor
) -> tuple[int, Explained] | None:
    """The one of these places along a dim whose numbers in the truth this block holds; None if there is none."""
    (own, end), cut = block.region[dim], [slice(a, b) for a, b in block.region]
    for start in starts:
        size = min(end - own, truth.shape[dim] - start)
        if start == own or size < OVERLAP * (end - own):
            continue
        cut[dim] = slice(start, start + size)
        there, here = truth[tuple(cut)], block.part_of(truth).narrow(dim, 0, size)
        distinct = float((there - here).norm()) > CLOSE * float(there.norm()) > 0
        moved = Explained(value=block.local.narrow(dim, 0, size), truth=here, guess=there, names=(name,), fitted=1)
        if distinct and moved.holds:
            return start, moved
    return None


def in_other_places(run: RecordedRun, truth: Truth, name: str) -> list[Cause]:
    """Whether the right numbers stand in wrong places."""
    value, axes = run.tensors.get(name), split_axes(run.case)
    if value is None:
        return []
    if kind_of(name) == "logits":
        axes |= {"data ranks and micro-batches": axes.get("dp", 1) * run.case.micro}
    return from_patterns(value, truth.tensors[name], axes, _other_steps(truth, name), name)


def _other_steps(truth: Truth, name: str) -> dict[str, Tensor]:
    """Truths of the same name in other steps, which a stale tensor equals: nearest first, earlier before later."""
    now = step_of(name)
    if now < 0:
        return {}
    alike = [other for other in truth.tensors if step_of(other) >= 0 and _but_for_step(other) == _but_for_step(name)]
    alike.sort(key=lambda other: (abs(step_of(other) - now), step_of(other)))
    return {other: truth.tensors[other] for other in alike if other != name}


def _but_for_step(name: str) -> tuple[str, str]:
    """Kind and path of a name with a step in it: "served", "q" of "served/1/q"."""
    kind, _, rest = name.partition("/")
    return kind, rest.partition("/")[2]


def from_other_tensors(truth: Truth, name: str, value: Tensor) -> list[Cause]:
    """Whether a tensor is another one of its kind and step, or consists of slices of several of them along one dim.

    A fused tensor looks like this if it is not cut where its parts were joined.
    """
    true, tensors = truth.tensors[name], truth.tensors
    if true.dim() < 2 or true.shape != value.shape or not value.is_floating_point():
        return []
    alike = [n for n in tensors if kind_of(n) == kind_of(name) and step_of(n) == step_of(name)]
    # A module may return what a module inside it returns: an equal tensor is not another one.
    others = [n for n in alike if not torch.equal(tensors[n], true)]
    for other in others:
        if tensors[other].shape == true.shape:
            is_other = Explained(value=value, truth=true, guess=tensors[other], names=(name,))
            if causes := claim_cause("other_part", state_fact("equals", other=other), is_other):
                return causes
    for dim in range(true.dim()):
        beside = [n for n in others if _without_dim(tensors[n], dim) == _without_dim(true, dim)]
        if causes := _of_slices(truth, name, value, dim, beside):
            return causes
    return []


def _without_dim(tensor: Tensor, dim: int) -> tuple[int, ...]:
    return () if tensor.dim() <= dim else (*tensor.shape[:dim], -1, *tensor.shape[dim + 1 :])


def _of_slices(truth: Truth, name: str, value: Tensor, dim: int, beside: Sequence[str]) -> list[Cause]:
    """Whether every slice along a dim comes from this tensor or from those `beside`, and some from the latter.

    Zeros show nothing, and neither do tensors whose slices are mostly equal to others.
    """
    tensors = [truth.tensors[n].double().movedim(dim, 0).flatten(1) for n in (name, *beside)]
    slices, mine = torch.cat(tensors), value.double().movedim(dim, 0).flatten(1)
    keys = torch.linspace(1.0, 2.0, slices.shape[1], dtype=torch.float64)
    line, order = (slices @ keys).sort()
    if not beside or not FEWEST <= len(slices) <= MOST_ROWS or 2 * len(line.unique()) <= len(line):
        return []
    above = torch.searchsorted(line, mine @ keys).clamp(1, len(line) - 1)
    nearest = order[above - (mine @ keys - line[above - 1] < line[above] - mine @ keys).long()]
    foreign = nearest >= len(tensors[0])
    if slices.shape[1] < FEWEST_OF_A_FACTOR or not foreign.any() or not slices[nearest[foreign]].any(1).all():
        return []
    owners = [other for other, rows in zip(beside, tensors[1:], strict=True) for _ in rows]
    others = [*dict.fromkeys(owners[row - len(tensors[0])] for row in nearest[foreign].tolist())]
    guess = slices[nearest].unflatten(1, value.movedim(dim, 0).shape[1:]).movedim(0, dim)
    is_made = Explained(value=value, truth=truth.tensors[name], guess=guess, names=(name,), fitted=len(nearest))
    return claim_cause("other_part", state_fact("slices_of_others", dim=dim, names=others), is_made)


def _stale_norm(failure: Failure) -> list[Cause]:
    """Whether a norm is that of another step."""
    value, name = failure.value, failure.first
    if value is None or kind_of(name) != "grad_norm":
        return []
    truth = failure.evidence.truth
    return from_patterns(value, truth.tensors[name], {}, _other_steps(truth, name), name)


def _zero_state(failure: Failure) -> list[Cause]:
    """Whether the first wrong state after a step is zero throughout."""
    value, name = failure.value, failure.first
    if value is None or not is_state(name) or bool(value.any()):
        return []
    return from_patterns(value, failure.evidence.truth.tensors[name], {}, {}, name)


HYPOTHESES = (
    Hypothesis(predicts="a state that is zero throughout", causes=_zero_state, kinds=frozenset({STATE})),
    Hypothesis(
        predicts="the right numbers in other places, those of another step, or zero",
        causes=of_values(lambda evidence, names: in_other_places(evidence.run, evidence.truth, names[0])),
        kinds=VALUES,
    ),
    Hypothesis(
        predicts="every wrong block is what belongs to another place",
        causes=lambda failure: from_regions(failure.evidence.run, failure.evidence.truth, failure.first),
        kinds=VALUES | {STATE},
    ),
    Hypothesis(
        predicts="another tensor of the same kind and step, or slices of several",
        causes=of_values(lambda seen, names: from_other_tensors(seen.truth, names[0], seen.run.tensors[names[0]])),
        kinds=VALUES | {STATE},
    ),
    Hypothesis(predicts="the norm of another step", causes=_stale_norm, kinds=frozenset({"grad_norm", LATER})),
)
