"""Clipping by another rule than the norm of all gradients: element by element, tensor by tensor, rank by rank.

Looked for in plain steps along the gradient, where the update is a number times the gradient. There the factor of every
element, block and rank shows. Only cases that clip are looked at.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from shardproof.harness.checking.evidence import Evidence
from shardproof.harness.diagnosing.causes.cause import Cause, claimed
from shardproof.harness.diagnosing.causes.places import blocks_of
from shardproof.harness.diagnosing.causes.proofs import Explained
from shardproof.harness.diagnosing.causes.proofs import times as in_words
from shardproof.harness.diagnosing.hypotheses.factors import Predict
from shardproof.harness.diagnosing.hypotheses.optimizer.moved import Moved, before_step, of_kind, times

APART = 1e-3
"""Factors are different ones beyond this share of themselves."""
SAME = 1e-9
"""Share within which a block's update is right."""
SEEN = 1e-3
"""Elements below this share of the largest show no factor."""


def by_element(evidence: Evidence, state: Moved, step: int) -> list[Cause]:
    """Whether every element is limited by itself: a factor on the small ones, one size for the large ones."""
    got, right = state.got, state.right
    if not getattr(evidence.case, "clip", 0.0) or not right.numel():
        return []
    seen = right.abs() >= SEEN * right.abs().max()
    if not bool(seen.any()):
        return []
    factor, largest = float((got[seen] / right[seen]).max()), float(got.abs().max())
    guess = (factor * right).clamp(-largest, largest)
    limited = int(((factor * right).abs() > largest).sum())
    if factor <= 0 or not 1 < limited < len(got):
        return []
    less = f"what moves less is {in_words(factor)} the right ones"
    words = f"in step {step} no element moves further than {largest:.3g}, and {less}"
    return claimed(
        "clipped_otherwise", words, Explained(value=got, truth=right, guess=guess, names=state.states, fitted=2)
    )


def by_square(evidence: Evidence, factor: float, relation: str, step: int, predict: Predict) -> list[Cause]:
    """Whether a factor on all updates is that of clipping by the square of the norm."""
    largest, norm = getattr(evidence.case, "clip", 0.0), evidence.truth.get(f"grad_norm/{step}")
    if not largest or norm is None or not float(norm) > 0 or factor <= 0:
        return []
    used = largest / (factor * min(1.0, largest / float(norm)))
    if not math.isclose(used, float(norm) ** 2, rel_tol=APART) or math.isclose(float(norm), 1, rel_tol=APART):
        return []
    words = f"{relation}, as if clipped by {used:.4g}, which is the square of the norm"
    return claimed("clipped_otherwise", words, *predict(factor))


def by_block(evidence: Evidence, wrong: Sequence[str], step: int) -> list[Cause]:
    """Whether what each rank holds of each parameter has moved by a factor of its own.

    The norm of a part is at most that of the whole, so the part is clipped less, or not at all.
    """
    largest, norm = getattr(evidence.case, "clip", 0.0), evidence.truth.get(f"grad_norm/{step}")
    if not largest or norm is None:
        return []
    factors: dict[tuple[str, int], float] = {}
    moved: list[tuple[Tensor, Tensor, Tensor]] = []
    for name, parameter in of_kind(evidence, wrong, "param", step):
        before = before_step(evidence, "param", step, parameter)
        for rank, blocks in blocks_of(evidence, name).items() if before is not None else ():
            for block in blocks:
                then = block.part_of(before.double()).flatten() if before is not None else None
                if then is None or not then.numel():
                    continue
                must = block.part_of(evidence.truth[name].double()).flatten()
                got, right = block.local.double().flatten() - then, must - then
                near = float((got - right).norm()) <= SAME * float(right.norm())
                factor = 1.0 if near else times(got, right)
                if factor is None or factor <= 0:
                    return []
                factors[parameter, rank] = factor
                moved.append((got, right, factor * right))
    if not factors or _alike(factors.values()):
        return []
    each = "each rank" if _by(factors, 1) else "every tensor" if _by(factors, 0) else "each rank's parts"
    low, high = min(factors.values()), max(factors.values())
    if low < 1 - APART or high > max(1.0, float(norm) / largest) * (1 + APART):
        return []
    words = f"the updates of step {step} are the right ones times a factor of {each}, from {low:.3g} to {high:.3g}"
    value, truth, guess = map(torch.cat, zip(*moved, strict=True))
    spoken = tuple(name for name, _ in of_kind(evidence, wrong, "param", step))
    own = Explained(value=value, truth=truth, guess=guess, left=APART, names=spoken, fitted=len(factors))
    return claimed("clipped_otherwise", words, own)


def _by(factors: Mapping[tuple[str, int], float], place: int) -> bool:
    """Whether all factors of one rank (1), or of one parameter (0), are alike."""
    groups: dict[object, list[float]] = {}
    for key, factor in factors.items():
        groups.setdefault(key[place], []).append(factor)
    return all(_alike(group) for group in groups.values())


def _alike(factors: Iterable[float]) -> bool:
    known = list(factors)
    return max(known) - min(known) <= APART * max(known)
