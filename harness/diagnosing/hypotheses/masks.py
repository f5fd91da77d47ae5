"""Why dropout masks that ranks drew themselves are wrong, if the masks leave no doubt.

There are four mistakes. Ranks that hold different shards, as over an axis, use one mask. Replicas use masks that are
independent of each other (by an exact test, not by similarity). A rank uses the mask of a module that other ranks
compute. Backward uses another mask than forward.

Sources: Megatron-LM #1256 (sequence parallelism from the default stream), #4828 (context ranks).
"""

import itertools
from collections.abc import Iterator
from itertools import combinations

import torch
from torch import Tensor

from shardproof.harness.checking.mask_checks import (
    ALARM,
    KIND,
    SHARES,
    flatten_blocks,
    holders_of_mask,
    hypergeometric,
    same_samples,
)
from shardproof.harness.checking.measures.kinds import kind_of
from shardproof.harness.checking.records import Claims, Evidence, RecordedRun
from shardproof.harness.diagnosing.causes.cause import Cause, report_cause
from shardproof.harness.diagnosing.causes.hypothesis import Failure
from shardproof.harness.mesh_axes import PIPELINE, place_of_rank
from shardproof.harness.verdicts.facts import state_fact
from shardproof.harness.verdicts.verdict import FAIL

_ORDINARY = 1e-3
"""Two masks whose overlap has a larger probability than this are as alike as independent masks."""


def from_masks(failure: Failure) -> list[Cause]:
    """The cause: masks that backward drew anew, else the first cause that fits the first wrong mask.

    The latter is looked for if the truth takes its masks from the ranks. Otherwise the truth shows which are right.
    """
    evidence, found = failure.evidence, failure.findings.get("masks")
    if found is not None and found.verdict == FAIL and evidence.run.mask_draws and evidence.run.mask_draws.anew:
        return [report_cause("other_numbers", state_fact("masks_drawn_anew"), evidence.run.mask_draws.anew)]
    first = next((name for name in failure.wrong if kind_of(name) == KIND), "")
    truth = evidence.truth
    if not first or not (truth.unmergeable or any(kind_of(name) == KIND for name in truth.from_ranks)):
        return []
    if strays := find_stray_holders(evidence.run, first):
        fact = state_fact("mask_of_other", module=site_of_mask(first), ranks=strays)
        return [report_cause("other_numbers", fact, strays)]
    streams = itertools.chain(_one_stream(evidence.run, evidence.claims, first), _own_streams(evidence, first))
    return list(itertools.islice(streams, 1))


def site_of_mask(name: str) -> str:
    """The module that applies this mask."""
    return name.split("/", 2)[-1].removesuffix(SHARES)


def find_stray_holders(run: RecordedRun, name: str) -> list[int]:
    """Ranks that drew a mask for a module that returned something only on other ranks."""
    by_rank, output = run.full_outcomes, f"act/{site_of_mask(name)}"
    computing = [rank for rank, outcome in enumerate(by_rank) if outcome.get(output)]
    holding = [rank for rank, outcome in enumerate(by_rank) if outcome.get(name)]
    return [rank for rank in holding if computing and rank not in computing]


def _one_stream(run: RecordedRun, claims: Claims, name: str) -> Iterator[Cause]:
    """An axis over which all shards of the same samples have the same mask; else two ranks whose shards have."""
    by_rank = holders_of_mask(run, name)
    for axis, groups in claims.axes.items():
        pairs = [(a, b) for group in groups for a, b in combinations([r for r in group if r in by_rank], 2)]
        masks = [
            (flatten_blocks(by_rank[a]), flatten_blocks(by_rank[b]))
            for a, b in pairs
            if same_samples(by_rank[a], by_rank[b])
        ]
        if masks and all(torch.equal(one, other) and _could_differ(one, other) for one, other in masks):
            yield report_cause("other_numbers", state_fact("one_mask", ranks=groups[0], axis=axis), pairs)
    for pair in combinations(by_rank, 2):
        one, other = (flatten_blocks(by_rank[rank]) for rank in pair)
        if torch.equal(one, other) and _could_differ(one, other):
            yield report_cause("other_numbers", state_fact("one_mask", ranks=pair, axis=""), pair)


def _own_streams(evidence: Evidence, name: str) -> Iterator[Cause]:
    """Replicas whose masks are independent of each other. Stages of a pipeline are no replicas."""
    by_region: dict[tuple[object, ...], list[tuple[int, Tensor]]] = {}
    for rank, outcome in enumerate(evidence.run.full_outcomes):
        if outcome.get(name):
            place = tuple(block.region for block in outcome[name])
            stage = place_of_rank(evidence.claims.axes, PIPELINE, rank)
            by_region.setdefault((stage, place), []).append((rank, flatten_blocks(outcome[name])))
    for copies in by_region.values():
        unlike = [(rank, mask) for rank, mask in copies if not torch.equal(mask, copies[0][1])]
        if unlike and all(_are_independent(copies[0][1], mask) for _, mask in unlike):
            ranks = [copies[0][0], *(rank for rank, _ in unlike)]
            yield report_cause("other_numbers", state_fact("own_masks", ranks=ranks), unlike)


def _are_independent(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or not _could_differ(one, other):
        return False
    both = int((one & other).sum())
    return hypergeometric(both, one.numel(), int(one.sum()), int(other.sum())) > _ORDINARY


def _could_differ(one: Tensor, other: Tensor) -> bool:
    """Whether independent masks of these sizes are never equal by chance."""
    first, second = int(one.sum()), int(other.sum())
    return hypergeometric(min(first, second), one.numel(), first, second) < ALARM
