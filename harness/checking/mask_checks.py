"""The check of dropout masks (`mask/<step>/<site>`), which show the elements that each rank kept.

Replicated masks belong to the check `replicas`. If the dense model knows the masks, they must equal its masks bit for
bit. Where masks were recorded as torch drew them, recomputation must have drawn none of its own (`anew`). Then exact
tests look for masks that are too improbable (`ALARM`):

    rate        every mask of a rank keeps as many elements as its rate says (binomial)
    shards      ranks that hold different parts of the same samples drew independent masks (hypergeometric)
    draws       no two masks of a rank, or of two stages of a pipeline, are equal, whatever they were drawn for

Ranks that hold different samples may draw equal masks: Megatron's data-parallel ranks do.

`rate` and `shards` are two-sided: twice the smaller tail, summed term by term from the exact distribution. A right
program fails this check at most with the probability `ALARM`, which is divided among its tests.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations, pairwise
from operator import itemgetter

import torch
from torch import Tensor

from shardproof.harness.checking.finding import Finding
from shardproof.harness.checking.measures.kinds import kind_of, step_of
from shardproof.harness.checking.numeric_checks import make_numeric_check
from shardproof.harness.checking.records import Claims, RecordedRun, Truth
from shardproof.harness.mesh_axes import pipelines
from shardproof.harness.outcome.blocks import Block
from shardproof.harness.verdicts.facts import Fact, note_unchecked, state_fact
from shardproof.harness.verdicts.verdict import FAIL, PASS, UNKNOWN

ALARM = 1e-9
_NEGLIGIBLE = 1e-17
"""The sum of a tail ends at a term of less than this share of the sum so far, since later terms are smaller still."""


@lru_cache(maxsize=1024)
def binomial(count: int, trials: int, probability: float) -> float:
    """Twice the smaller tail of a count, at most 1, among independent trials of this probability."""
    if not 0 < probability < 1:
        return float(count == trials * probability)

    def log_term(k: int) -> float:
        chance = k * math.log(probability) + (trials - k) * math.log1p(-probability)
        return _log_choose(trials, k) + chance

    return _two_sided(count, 0, trials, log_term)


@lru_cache(maxsize=1024)
def hypergeometric(both: int, total: int, first: int, second: int) -> float:
    """Twice the smaller tail, at most 1, of the overlap of two independent sets.

    The sets have `first` and `second` out of `total` elements.
    """

    def log_term(k: int) -> float:
        return _log_choose(first, k) + _log_choose(total - first, second - k) - _log_choose(total, second)

    return _two_sided(both, max(0, first + second - total), min(first, second), log_term)


def _two_sided(count: int, least: int, most: int, log_term: Callable[[int], float]) -> float:
    below = _sum_tail(count, -1, least, log_term)
    above = _sum_tail(count, 1, most, log_term)
    return min(1.0, 2 * min(below, above))


def _sum_tail(start: int, way: int, end: int, log_term: Callable[[int], float]) -> float:
    """The sum of the terms from `start` to `end`, in this direction; 1 once it is more than half."""
    total, before = 0.0, -1.0
    for k in range(start, end + way, way):
        term = math.exp(log_term(k))
        total += term
        if total > 0.5:
            return 1.0
        if term <= before and term <= _NEGLIGIBLE * total:
            break
        before = term
    return total


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


KIND = "mask"
SHARES = ".shares"
"""The end of the names of masks that drop attention probabilities in a module."""
_ALL_PAIRS = 8
"""Up to this many ranks, each one is tested with every other; among more ranks, each with the next one."""
_compared = make_numeric_check("masks")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Test:
    """An exact test: the probability of what was counted, the least that any count has, and the fact to state."""

    name: str
    ranks: tuple[int, ...]
    probability: float
    least: float
    fact: Fact


def check_masks(run: RecordedRun, truth: Truth, claims: Claims) -> Finding | None:
    """Whether dropout kept the elements that it should, by the masks that ranks returned or that were recorded."""
    names = [name for name in run.returned if kind_of(name) == KIND]
    if not names:
        return None
    names = [name for name in truth.tensors if name in names] or sorted(names)
    by_rank = (*run.outcomes, *run.captured)
    dtypes = {name: {block.local.dtype for by in by_rank for block in by.get(name, ())} for name in names}
    if wrong := [name for name in names if dtypes[name] - {torch.bool}]:
        return Finding(verdict=FAIL, facts=(state_fact("mask_dtype", name=wrong[0]),), names=tuple(wrong))
    if run.mask_draws and run.mask_draws.anew:
        (line, rank), *others = run.mask_draws.anew
        anew = state_fact("drawn_anew", line=line, rank=rank, others=len(others))
        return Finding(verdict=FAIL, facts=(anew,), ranks=tuple({rank: 0 for _, rank in run.mask_draws.anew}))
    known = None if set(names) & set(truth.from_ranks) else _compared(run, truth, claims)
    if known is not None and known.verdict == FAIL:
        return known
    tests = [test for name in names for test in _of_one(run, name)] + list(_of_draws(run, claims, names))
    limit = ALARM / max(1, len(tests))
    broken = [test for test in tests if test.probability < limit]
    if broken:
        more = (state_fact("more_improbable", count=len(broken) - 1, tests=len(tests)),) if len(broken) > 1 else ()
        first = broken[0]
        odd = state_fact("improbable", test=first.fact, probability=first.probability, allowed=limit)
        wrong_names = tuple(dict.fromkeys(test.name for test in broken))
        return Finding(verdict=FAIL, facts=(odd, *more), names=wrong_names, ranks=first.ranks)
    small = sum(test.least >= limit for test in tests)
    notes = note_unchecked(f"{small} of {len(tests)} tests of masks, too small to show anything") if small else ()
    if any(_rate_of_mask(run, name) is None for name in names):
        notes += note_unchecked("the rate of dropout, which the case does not say")
    tested = state_fact("masks_right", tests=len(tests), masks=len(names))
    if known is None:
        verdict = UNKNOWN if small == len(tests) else PASS
        return Finding(verdict=verdict, facts=(tested, state_fact("given_to_truth")), notes=notes)
    return replace(known, facts=(*known.facts, tested), notes=(*known.notes, *notes))


def _rate_of_mask(run: RecordedRun, name: str) -> float | None:
    """The share that this mask drops, by the words of the case or as it was drawn; None if neither is known."""
    if run.mask_draws:
        return run.mask_draws.rates[name]
    rate: float | None = getattr(run.case, "attention_dropout" if name.endswith(SHARES) else "dropout", None)
    return rate


def holders_of_mask(run: RecordedRun, name: str) -> dict[int, Sequence[Block]]:
    """Rank -> its blocks, for one of the ranks that hold each part of the mask."""
    found: dict[tuple[object, ...], int] = {}
    outcomes = run.full_outcomes
    for rank, outcome in enumerate(outcomes):
        if outcome.get(name):
            found.setdefault(tuple(block.region for block in outcome[name]), rank)
    return {rank: outcomes[rank][name] for rank in found.values()}


def flatten_blocks(blocks: Sequence[Block]) -> Tensor:
    """The elements of a rank's blocks, concatenated."""
    return torch.cat([block.local.flatten() for block in blocks])


def _of_one(run: RecordedRun, name: str) -> Iterator[_Test]:
    """Tests of one mask: of its rate on each rank, and of the independence of its shards."""
    by_rank, rate = holders_of_mask(run, name), _rate_of_mask(run, name)
    for rank, blocks in by_rank.items():
        mask = flatten_blocks(blocks)
        kept, total = int(mask.sum()), mask.numel()
        if rate is not None:
            fact = state_fact("mask_rate", name=name, kept=kept, elements=total, rank=rank, rate=rate)
            least = min(binomial(0, total, 1 - rate), binomial(total, total, 1 - rate))
            yield _Test(name=name, ranks=(rank,), probability=binomial(kept, total, 1 - rate), least=least, fact=fact)
    ranks = list(by_rank)
    pairs = combinations(ranks, 2) if len(ranks) <= _ALL_PAIRS else pairwise(ranks)
    for one_rank, other_rank in pairs:
        if same_samples(by_rank[one_rank], by_rank[other_rank]):
            masks = (flatten_blocks(by_rank[rank]) for rank in (one_rank, other_rank))
            yield from _test_independence(name, (one_rank, other_rank), *masks)


def same_samples(one: Sequence[Block], other: Sequence[Block]) -> bool:
    """Whether two ranks' parts of a mask are of the same samples."""
    return {block.region[0] for block in one} == {block.region[0] for block in other}


def _of_draws(run: RecordedRun, claims: Claims, names: Sequence[str]) -> Iterator[_Test]:
    """Whether a rank, or the stages of one pipeline, drew the same mask twice, among all its masks of one shape: those
    of every micro-batch, site and step. The first mask, in the order of training, that was drawn before is told.
    """
    outcomes = run.full_outcomes
    alone = [(rank,) for rank in range(len(outcomes))]
    for ranks in pipelines(claims.axes) or alone:
        masks: list[tuple[int, int, str, Tensor]] = []
        for name in names:
            rank = next((rank for rank in ranks if outcomes[rank].get(name)), ranks[0])
            for number, block in enumerate(outcomes[rank].get(name, ())):
                masks.append((step_of(name), number, f"{name} on rank {rank}", block.local))
        by_shape: dict[tuple[int, ...], list[tuple[str, Tensor]]] = {}
        for *_, what, mask in sorted(masks, key=itemgetter(0, 1)):  # all sites of a micro-batch come before the next
            by_shape.setdefault(tuple(mask.shape), []).append((what, mask))
        for drawn in by_shape.values():
            if len(drawn) == 1:
                continue
            seen: dict[bytes, str] = {}
            draws = [(f"{what} (draw {number})", mask) for number, (what, mask) in enumerate(drawn)]
            keys = [(what, mask.contiguous().numpy().tobytes()) for what, mask in draws]
            twice = ((seen[key], what) for what, key in keys if seen.setdefault(key, what) is not what)
            yield _test_equality_of_masks(drawn, ranks, *next(twice, ("", "")))


def _test_equality_of_masks(drawn: Sequence[tuple[str, Tensor]], ranks: tuple[int, ...], one: str, other: str) -> _Test:
    """The probability that any two of these masks are equal, if each element is drawn independently."""
    kept = sum(float(mask.double().mean()) for _, mask in drawn) / len(drawn)
    total, pairs = drawn[0][1].numel(), len(drawn) * (len(drawn) - 1) / 2
    least = min(1.0, pairs * (kept**2 + (1 - kept) ** 2) ** total)
    return _Test(
        name=other.partition(" ")[0],
        ranks=ranks,
        probability=least if other else 1.0,
        least=least,
        fact=state_fact("mask_twice", mask=other, other=one),
    )


def _test_independence(name: str, ranks: tuple[int, int], one: Tensor, other: Tensor) -> Iterator[_Test]:
    """The test of two masks; none for different shapes."""
    if one.shape != other.shape or not one.numel():
        return
    total, first, second = one.numel(), int(one.sum()), int(other.sum())
    both = int((one & other).sum())
    agree, expected = int((one == other).sum()), (first * second + (total - first) * (total - second)) / total
    fact = state_fact(
        "masks_alike", name=name, rank=ranks[0], other=ranks[1], agree=agree, elements=total, expected=expected
    )
    yield _Test(
        name=name,
        ranks=ranks,
        probability=hypergeometric(both, total, first, second),
        least=hypergeometric(min(first, second), total, first, second),
        fact=fact,
    )
