"""Checks of what ranks are compared with and begin with: the data that truth and ranks read alike, how many tokens a
step counts, initial values, and that a dense model of the subject's own is one model in every precision.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from harness.checking.evidence import FAIL, PASS, Evidence, Finding, Worst
from harness.checking.measures.kinds import kind_of
from harness.checking.numeric_checks import numeric

_counts = numeric("tokens")
_SHOWN = 8
"""Elements of a short tensor that a message shows."""


def data(evidence: Evidence) -> Finding | None:
    """Whether the statements about the case's data hold which its reference makes beside the code that reads them.

    Truth and ranks take their batches from the same code, so a mistake in it shows in no comparison of the two. None
    for a reference that states nothing.
    """
    facts = evidence.facts
    if facts is None:
        return None
    broken = [f"{name}: {_told(found, must)}" for name, (found, must) in facts.pairs.items() if not _same(found, must)]
    if broken:
        more = f"; {len(broken) - 1} more of {len(facts.pairs)} statements are wrong" if len(broken) > 1 else ""
        message = f"the data are wrong for truth and ranks alike: {broken[0]}{more}"
        return Finding(verdict=FAIL, message=message, unchecked=facts.unchecked, phase="data")
    message = f"{len(facts.pairs)} statements about the data hold; {facts.reading}"
    return Finding(verdict=PASS, message=message, unchecked=facts.unchecked)


def tokens(evidence: Evidence) -> Finding | None:
    """Whether every step counts as many tokens as the dense model, exactly: the number that its mean divides by."""
    finding = _counts(evidence)
    if finding is None or finding.verdict != FAIL or finding.worst is None:
        return finding
    name = finding.worst.name
    counted, must = (int(tensors[name]) for tensors in (evidence.merged.tensors, evidence.truth))
    return replace(finding, message=f"{name} is {counted}, and the dense model counts {must}")


def truth(evidence: Evidence) -> Finding | None:
    """Whether the first forward of the dense model in float32 is that in float64, but for rounding; None where that was
    not looked at (harness.running.trials.law_runs).
    """
    found = evidence.first_forward
    if found is None:
        return None
    worst = Worst(name=found.name, error=found.error, allowed=found.allowed, epsilons=found.epsilons)
    if found.right:
        message = f"the dense model is one function in float32 and in float64; {found.name} came closest to the limit"
        return Finding(verdict=PASS, message=message, worst=worst)
    message = "the dense model computes another function in float32 than in float64"
    return Finding(verdict=FAIL, message=f"{message}, as {found.name} of its forward shows", worst=worst)


def _same(found: Tensor, must: Tensor) -> bool:
    return found.shape == must.shape and bool((found == must).all())


def _told(found: Tensor, must: Tensor) -> str:
    """Both in full when they are short; else where they differ."""
    if max(found.numel(), must.numel()) <= _SHOWN or found.shape != must.shape:
        return f"{_start(found)}, must be {_start(must)}"
    wrong = (found != must).flatten()
    at = int(wrong.int().argmax())
    values = (int(tensor.flatten()[at]) for tensor in (found, must))
    return (
        "element {} is {}, must be {}".format(at, *values) + f"; {int(wrong.sum())} of {must.numel()} elements differ"
    )


def _start(tensor: Tensor) -> str:
    values = tensor.flatten().tolist()
    shown = f"{values[:_SHOWN]}"[:-1] + (", ...]" if len(values) > _SHOWN else "]")
    return shown if tensor.dim() else str(tensor.item())


KIND = "init"
SIGMAS = 6.0
_FIRST = 8
"""Numbers in the order of memory; equal by chance in two tensors of bfloat16 about once in 10^18 pairs."""
_compared = numeric("initial_values")


def initial_values(evidence: Evidence) -> Finding | None:
    """Whether parameters begin as they should; None where no rank returned how they begin.

        deviation   standard deviations are those that the reference states, within SIGMAS standard errors of their
                    variance (that of normal numbers, which bounds flatter ones); constants have none
        equal       no two parameters, and no two shards of one, begin with the same _FIRST numbers, but constants: of
                    one seed, shards of unequal sizes have their first numbers in common

    Where the dense model knows the values they are compared with it; replicas are the check `replicas`.
    """
    names = [name for name in evidence.returned if kind_of(name) == KIND]
    if not names:
        return None
    names = [name for name in evidence.truth if name in names] or sorted(names)
    wrong = dict([*_equal(evidence, names), *_deviating(evidence, names)])
    if wrong:
        first = next(name for name in names if name in wrong)
        more = f"; {len(wrong) - 1} more of {len(names)} are wrong" if len(wrong) > 1 else ""
        ordered = tuple(name for name in names if name in wrong)
        return Finding(verdict=FAIL, message=f"{first} {wrong[first]}{more}", names=ordered)
    stated = sum(name.partition("/")[2] in evidence.deviations for name in names)
    told = f"{stated} of {len(names)} parameters begin with the right deviations, and no two alike"
    unchecked = () if stated else ("deviations of initial values, which nothing states",)
    known = None if set(names) & set(evidence.given) else _compared(evidence)
    if known is None:
        return Finding(verdict=PASS, message=f"{told}; the dense model was given them", unchecked=unchecked)
    if known.verdict != PASS:
        return known
    return replace(known, message=f"{known.message}; {told}", unchecked=(*known.unchecked, *unchecked))


def _deviating(evidence: Evidence, names: list[str]) -> Iterator[tuple[str, str]]:
    for name in names:
        value, right = evidence.merged.tensors.get(name), evidence.deviations.get(name.partition("/")[2])
        if value is None or right is None:
            continue
        found = math.sqrt(float(value.double().var(correction=0)))
        slack = SIGMAS * math.sqrt(2 / value.numel())
        if right == 0 and found > 0:
            yield name, f"has a standard deviation of {found:.3g}, and begins as a constant"
        elif right and abs((found / right) ** 2 - 1) > slack:
            yield name, f"has a standard deviation of {found:.3g}, which must be {right:.3g}"


def _equal(evidence: Evidence, names: list[str]) -> Iterator[tuple[str, str]]:
    """Parameters, and shards of one, that begin with the numbers of one before."""
    seen: dict[bytes, str] = {}
    for name in names:
        held = {
            block.region: (rank, block.local)
            for rank, outcome in reversed([*enumerate(evidence.outcomes)])
            for block in outcome.get(name, ())
        }
        for rank, local in sorted(held.values(), key=lambda one: one[0]):
            if _is_constant(local):
                continue
            what = f"{name} on rank {rank}"
            first = local.flatten()[:_FIRST]
            start = local.flatten() if _is_constant(first) else first
            before = seen.setdefault(start.contiguous().view(torch.uint8).numpy().tobytes(), what)
            if before is not what:
                yield name, f"on rank {rank} holds the numbers of {before}"


def _is_constant(local: Tensor) -> bool:
    return local.numel() < 2 or bool((local == local.flatten()[0]).all())


def masks(evidence: Evidence) -> Finding | None:
    """Whether dropout kept what it should; None where no rank returned a mask."""
    if not _has_any(evidence, "mask"):
        return None
    from harness.checking.mask_checks import masks as check  # noqa: PLC0415

    return check(evidence)


def routing(evidence: Evidence) -> Finding | None:
    """Whether every token goes to the experts that it must go to; None where no rank returned a map."""
    if not _has_any(evidence, "routing"):
        return None
    from harness.checking.routing_checks import routing as check  # noqa: PLC0415

    return check(evidence)


def regrouping(evidence: Evidence) -> Finding | None:
    """Whether the step is the same in every other grouping that was run; None when there was none."""
    if not evidence.regrouped:
        return None
    from harness.checking.regrouping import regrouping as check  # noqa: PLC0415

    return check(evidence)


def _has_any(evidence: Evidence, kind: str) -> bool:
    return any(kind_of(name) == kind for name in evidence.returned)
