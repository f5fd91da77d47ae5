"""Right numbers in wrong places: patterns of a whole tensor, another rank's part, an offset, one wrong shard.

Each rank's own blocks are held against the truth at the places where other ranks' blocks begin. So parts of unequal
size, and a last one that is shorter, are looked at too. Then flat memory that is read at another place than it was
written: what lies flat is what a rank holds. Offsets are counted in elements.
"""

from collections.abc import Sequence

from torch import Tensor

from shardproof.harness.checking.evidence import Evidence
from shardproof.harness.checking.measures.kinds import kind_of
from shardproof.harness.diagnosing.causes.cause import Cause, claimed, reported
from shardproof.harness.diagnosing.causes.hypothesis import LATER, VALUES, Failure, Hypothesis, of_values
from shardproof.harness.diagnosing.causes.places import blocks_of, comparable, wrong_ranks
from shardproof.harness.diagnosing.causes.proofs import Explained, share_left
from shardproof.harness.diagnosing.hypotheses.patterns import CLOSE, from_patterns
from shardproof.harness.diagnosing.hypotheses.sum_terms import added
from shardproof.harness.mesh_axes import split_axes
from shardproof.harness.outcome.blocks import Block

OVERLAP = 0.5
"""Share of a part that must lie inside the tensor at the other place."""


def from_regions(evidence: Evidence, name: str) -> list[Cause]:
    """Whether every wrong block of a tensor holds what belongs to another place along one dim."""
    if not comparable(evidence, name):
        return []
    blocks = [(rank, block) for rank, of_rank in blocks_of(evidence, name).items() for block in of_rank]
    truth = evidence.truth[name].double()
    for dim in range(truth.dim()):
        starts = sorted({block.region[dim][0] for _, block in blocks})
        wrong = [(rank, block) for rank, block in blocks if _wrong(block, truth)]
        places = [there for _, block in wrong if (there := _elsewhere(name, block, dim, starts, truth))]
        if len(starts) > 1 and wrong and len(places) == len(wrong):
            (rank, block), (start, _) = wrong[0], places[0]
            words = f"along dim {dim} rank {rank} holds what lies at {start}, where {block.region[dim][0]} is meant"
            return claimed("other_shard", words, *(moved for _, moved in places))
    return []


def _wrong(block: Block, truth: Tensor) -> bool:
    true = block.part_of(truth)
    return float((block.local.double() - true).norm()) > share_left(block.local) * float(true.norm())


def _elsewhere(name: str, block: Block, dim: int, starts: Sequence[int], truth: Tensor) -> tuple[int, Explained] | None:
    """Where along a dim the numbers of this block lie in truth, of these places; None when at none of them."""
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


FURTHEST = 8
"""Offsets beyond this many elements are not looked for."""
LEFT = 1e-4
"""Share of the error that may be left between elements that are taken for the same."""
DISTINCT = 1e-2
"""Share of the truth by which it must differ from its own neighbours, or any offset would fit."""
LOOKED_AT = 8
"""Wrong gradients that are looked at, the first ones, until one would show an offset."""
THROUGHOUT = 0.9
"""Share of a shard's elements that are wrong when the shard is."""


def from_offsets(evidence: Evidence, wrong: Sequence[str]) -> list[Cause]:
    """Whether the first wrong gradient that would show an offset holds, on every rank, the right elements at one."""
    names = [name for name in wrong if kind_of(name) == "grad" and name in evidence.truth]
    for name in names[:LOOKED_AT]:
        truth = evidence.truth[name].double()
        blocks = [block for of_rank in blocks_of(evidence, name).values() for block in of_rank]
        pairs = [(block.local.double().flatten(), block.part_of(truth).flatten()) for block in blocks]
        shows = False
        for offset in (sign * places for places in range(1, FURTHEST + 1) for sign in (1, -1)):
            late = "late" if offset > 0 else "early"
            words = f"its elements stand {abs(offset)} too {late} in flat memory"
            slid = [explained for x, t in pairs if (explained := _slid(name, x, t, offset))]
            distinct = len(slid) == len(pairs)
            if causes := claimed("flat_offset", words, *slid) if distinct else []:
                return causes
            shows = shows or distinct
        if shows:
            return []
    return []


def _slid(name: str, x: Tensor, t: Tensor, offset: int) -> Explained | None:
    """The block as elements of the truth `offset` places on; None where it would hold of any offset."""
    if x.shape != t.shape or len(t) < 2 * FURTHEST:
        return None
    if offset < 0:
        x, t, offset = x.flip(0), t.flip(0), -offset
    kept, here = t[:-offset], t[offset:]
    power = float(kept.norm())
    distinct = float((here - kept).norm()) > DISTINCT * power > 0
    explained = Explained(value=x[offset:], truth=here, guess=kept, left=LEFT, names=(name,), fitted=1)
    return explained if distinct else None


def in_other_places(evidence: Evidence, name: str) -> list[Cause]:
    """Causes of right numbers that stand in wrong places; none for a tensor without a truth."""
    if evidence.truth.get(name) is None:
        return []
    return _of_places(evidence, name) or from_regions(evidence, name)


def _of_places(evidence: Evidence, name: str) -> list[Cause]:
    """Whether the right numbers stand in wrong places, perhaps beside what a module itself adds."""
    value, truth = evidence.merged.tensors.get(name), evidence.truth[name]
    if value is None:
        return []
    axes = split_axes(evidence.case)
    if kind_of(name) == "logits":
        axes |= {"data ranks and micro-batches": axes.get("dp", 1) * evidence.case.micro}
    causes = from_patterns(value, truth, axes, _other_steps(evidence, name), name)
    if causes or kind_of(name) != "act" or not (terms := added(evidence, name)):
        return causes
    own = sum(terms.values())
    return from_patterns((value.double() - own).to(value.dtype), truth.double() - own, axes, {}, name)


def _other_steps(evidence: Evidence, name: str) -> dict[str, Tensor]:
    """Truths of the same kind and another step: what a stale tensor would equal."""
    kind, _, rest = name.partition("/")
    alike = [other for other in evidence.truth if rest.isdigit() and other != name and kind_of(other) == kind]
    return {other: evidence.truth[other] for other in alike}


def _stale_norm(failure: Failure) -> list[Cause]:
    """Whether a norm is that of another step."""
    value, name = failure.value, failure.first
    if value is None or kind_of(name) != "grad_norm":
        return []
    return from_patterns(value, failure.evidence.truth[name], {}, _other_steps(failure.evidence, name), name)


def _one_shard(evidence: Evidence, name: str) -> list[Cause]:
    """Whether a gradient that is cut over an axis is wrong at one place of that axis alone, and all over that part.

    An activation's part is a matter of whose tokens are wrong, which is reported beside its place.
    """
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


_GRADIENTS = frozenset({"grad"})
HYPOTHESES = (
    Hypothesis(
        predicts="the right numbers in other places, those of another step, or zero",
        causes=of_values(lambda evidence, names: _of_places(evidence, names[0])),
        kinds=VALUES,
    ),
    Hypothesis(
        predicts="every wrong block is what belongs to another place",
        causes=of_values(lambda evidence, names: from_regions(evidence, names[0])),
        kinds=VALUES,
    ),
    Hypothesis(
        predicts="every rank's gradient is the right one, some elements on",
        causes=of_values(from_offsets),
        kinds=_GRADIENTS,
    ),
    Hypothesis(
        predicts="one shard is wrong throughout, all others are right",
        causes=of_values(lambda evidence, names: _one_shard(evidence, names[0])),
        kinds=_GRADIENTS,
    ),
    Hypothesis(predicts="the norm of another step", causes=_stale_norm, kinds=frozenset({"grad_norm", LATER})),
)
