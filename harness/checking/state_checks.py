"""Checks of states: how parameters begin, and whether the files of a checkpoint hold what the ranks hold."""

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from shardproof.harness.checking.coverage import is_declared
from shardproof.harness.checking.finding import Finding
from shardproof.harness.checking.measures.kinds import kind_of
from shardproof.harness.checking.numeric_checks import make_numeric_check
from shardproof.harness.checking.records import Claims, RecordedRun, Truth
from shardproof.harness.outcome.merging import same_bits, state_differences
from shardproof.harness.verdicts.facts import Fact, note_unchecked, notes_about, state_fact
from shardproof.harness.verdicts.verdict import FAIL, PASS, UNKNOWN

KIND = "init"
SIGMAS = 6.0
_FIRST = 8
"""How many first numbers are compared. Two tensors of bfloat16 have as many in common by chance once in 10^18 pairs."""
_compared = make_numeric_check("initial_values")


def check_initial_values(run: RecordedRun, truth: Truth, claims: Claims) -> Finding | None:
    """Whether parameters begin as they should.

        deviation   standard deviations are those that the reference states, within SIGMAS standard errors of their
                    variance (those of normal numbers, which bound flatter ones); constants have none
        equal       no two parameters, and no two shards of one, begin with the same _FIRST numbers. Constants do not
                    count, and neither do shards that begin at the same element: drawn from one seed, shards of unequal
                    sizes have their first numbers in common

    If the dense model knows the values they are compared with it. Replicas belong to the check `replicas`.
    """
    names = [name for name in run.returned if kind_of(name) == KIND]
    if not names:
        return None
    names = [name for name in truth.tensors if name in names] or sorted(names)
    wrong = dict([*_find_equal_starts(run, names), *_find_deviating_states(run, truth, names)])
    if wrong:
        first = next(name for name in names if name in wrong)
        more = (state_fact("more_wrong", count=len(wrong) - 1, of=len(names)),) if len(wrong) > 1 else ()
        ordered = tuple(name for name in names if name in wrong)
        return Finding(verdict=FAIL, facts=(wrong[first], *more), names=ordered)
    stated = sum(name.partition("/")[2] in truth.init_std for name in names)
    right = state_fact("starts_right", stated=stated, names=len(names))
    notes = () if stated else note_unchecked("deviations of initial values, which nothing states")
    known = None if set(names) & set(truth.from_ranks) else _compared(run, truth, claims)
    if known is None:
        return Finding(verdict=PASS, facts=(right, state_fact("given_to_truth")), notes=notes)
    if known.verdict != PASS:
        return known
    return replace(known, facts=(*known.facts, right), notes=(*known.notes, *notes))


def _find_deviating_states(run: RecordedRun, truth: Truth, names: list[str]) -> Iterator[tuple[str, Fact]]:
    for name in names:
        value, right = run.tensors.get(name), truth.init_std.get(name.partition("/")[2])
        if value is None or right is None:
            continue
        deviation = math.sqrt(float(value.double().var(correction=0)))
        slack = SIGMAS * math.sqrt(2 / value.numel())
        if right == 0 and deviation > 0:
            yield name, state_fact("not_constant", name=name, deviation=deviation)
        elif right and abs((deviation / right) ** 2 - 1) > slack:
            yield name, state_fact("other_deviation", name=name, deviation=deviation, right=right)


def _find_equal_starts(run: RecordedRun, names: list[str]) -> Iterator[tuple[str, Fact]]:
    """Parameters, and shards of one parameter, that begin with the same numbers as an earlier one."""
    seen: dict[bytes, tuple[int, tuple[str, tuple[int, ...]]]] = {}
    for name in names:
        shards = {
            block.region: (rank, block)
            for rank, outcome in reversed([*enumerate(run.outcomes)])
            for block in outcome.get(name, ())
        }
        for rank, block in sorted(shards.values(), key=lambda shard: shard[0]):
            local = block.local
            if _is_constant(local):
                continue
            at = name, block.offsets
            first = local.flatten()[:_FIRST]
            start = local.flatten() if _is_constant(first) else first
            other_rank, there = seen.setdefault(start.contiguous().view(torch.uint8).numpy().tobytes(), (rank, at))
            if there != at:
                yield name, state_fact("equal_starts", name=name, rank=rank, other=there[0], other_rank=other_rank)


def _is_constant(local: Tensor) -> bool:
    return local.numel() < 2 or bool((local == local.flatten()[0]).all())


_COUNTS = ("steps", "step_after", "loss_scale")
"""Kinds of saved/ that are single numbers: counts of steps, and the loss scale."""


def check_saved_state(run: RecordedRun, truth: Truth, claims: Claims) -> Finding | None:
    """Whether the files of a checkpoint (`saved/<name>`) hold what the ranks hold under that name, bit for bit.

    The files are read as full tensors, if possible by another reader than the one that loads them. The ranks' tensors
    are merged from their shards, and `update` compares them with the dense model. So a save in a wrong order is noticed
    when it is written, even if a load with the same error would undo it. Integers that ranks do not return (steps, the
    state of the loss scale) are compared with the truth, since rounding does not change them.

    Files lack a tensor of the truth's checkpoint where the ranks hold it, or where others of its kind are in the files.
    """
    names = [name for name in run.returned if kind_of(name) == "saved"]
    if not names:
        return None
    ordered = [name for name in truth.tensors if name in names] or sorted(names)
    merged = run.tensors
    counts = {name: truth.tensors.get(name) for name in ordered if name.split("/")[1] in _COUNTS}
    right = {name: merged.get(name.partition("/")[2], counts.get(name)) for name in ordered}
    known = {name: (merged[name], must) for name, must in right.items() if must is not None and name in merged}
    unseen = notes_about(undecided=tuple(name for name in ordered if name not in known))
    wrong = [name for name, (files, must) in known.items() if not same_bits(files, must)]
    kinds = {name.split("/")[1] for name in names}
    lost = [
        name
        for name in truth.tensors
        if kind_of(name) == "saved" and name not in run.returned and not is_declared(name, claims.declared)
        if name.split("/")[1] in kinds or name.partition("/")[2] in run.returned
    ]
    if lost and not wrong:
        fact = state_fact("saved_lacks", name=lost[0], lost=len(lost), count=len(lost) + len(names))
        return Finding(verdict=FAIL, facts=(fact,), notes=unseen, names=tuple(lost))
    if wrong:
        files, must = known[wrong[0]]
        beside = "the ranks" if wrong[0].partition("/")[2] in merged else "the truth"
        differs = state_fact("saved_differs", name=wrong[0], beside=beside, how=state_differences(files, must))
        return Finding(verdict=FAIL, facts=(differs,), notes=unseen, names=tuple(wrong))
    if not known:
        return Finding(verdict=UNKNOWN, facts=(state_fact("nothing_saved"),), notes=unseen)
    return Finding(verdict=PASS, facts=(state_fact("saved_right", count=len(known)),), notes=unseen)
