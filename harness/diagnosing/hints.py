"""Hints about the first place where no cause fits: words that claim no cause, each of them true of the numbers.

Hints are about initial values, when parameters differ before any step; drawn numbers that stand in places of others.
Then a factor that is a size of the case, when the evidence does not single out its origin, or one on an update. Last,
which tensors agree with the truth and which do not.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from shardproof.harness.checking.evidence import Evidence
from shardproof.harness.checking.measures.kinds import KIND_WORDS, kind_of
from shardproof.harness.diagnosing.causes.places import blocks_of, comparable
from shardproof.harness.diagnosing.causes.proofs import FEWEST_OF_A_FACTOR, independent, share_left
from shardproof.harness.diagnosing.causes.proofs import times as in_words
from shardproof.harness.diagnosing.first_place import First
from shardproof.harness.diagnosing.hypotheses.displaced import in_other_places
from shardproof.harness.diagnosing.hypotheses.factors import sizes_of
from shardproof.harness.diagnosing.hypotheses.optimizer.moved import moved, times
from shardproof.harness.errors import ranks_text

MOVED = 5.0
"""A parameter whose error exceeds this many times its movement in training had another initial value."""


def hint(evidence: Evidence, first: First, wrong: Sequence[str], undecided: Collection[str] = ()) -> str:
    """Hints on the first place, joined by "; ", or "". `wrong` are all wrong names in the order of training.

    `undecided` are names of which no check says whether they are right.
    """
    if not first.name or first.event or evidence.located is not None or not comparable(evidence, first.name):
        return agreement(evidence, wrong, undecided)
    known = [*_of_start(evidence, first), *_of_factor(evidence, first.name), *_of_update(evidence, first, wrong)]
    return "; ".join(known) or agreement(evidence, wrong, undecided)


def agreement(evidence: Evidence, wrong: Sequence[str], undecided: Collection[str] = ()) -> str:
    """Which tensors agree with the truth and which do not, by their kinds; "" where none is decided.

    Names that no check decides are in neither.
    """
    bad = [name for name in wrong if name in evidence.truth]
    good = {*evidence.merged.tensors} & {*evidence.truth} - {*wrong} - {*undecided}
    of, right, off = (
        Counter(KIND_WORDS.get(kind, kind) for kind in map(kind_of, n)) for n in (evidence.truth, good, bad)
    )
    sides = (("wrong", off), ("right", right))
    parts = [
        f"{side}: {', '.join(f'{kind} {count[kind]} of {of[kind]}' for kind in of if count[kind])}"
        for side, count in sides
        if count
    ]
    return "; ".join(parts)


def _of_start(evidence: Evidence, first: First) -> Iterator[str]:
    """Initial values: returned ones, or those of the first wrong module, which training moved by less than they err."""
    if kind_of(first.name) == "init":
        yield "initial values: parameters as built differ from the truth, before any step"
    if kind_of(first.name) in ("init", "mask"):
        yield from (cause.words for cause in in_other_places(evidence, first.name))
    values = evidence.merged.tensors
    for name in evidence.truth if kind_of(first.name) == "act" else ():
        start, gradient = (evidence.shares.get(name.replace("param/", "start/", 1)), name.replace("param/", "grad/", 1))
        if start is None or not name.startswith(f"param/{first.region}.") or not {name, gradient} <= {*values}:
            continue
        gradients = [float(of[gradient].double().norm()) for of in (values, evidence.truth)]
        more = max(1.0, gradients[0] / gradients[1]) if gradients[1] else math.inf  # a wrong gradient moves it further
        moved_by = more * float((evidence.truth[name].double() - start.double()).norm())
        if float((values[name].double() - evidence.truth[name].double()).norm()) > MOVED * moved_by:
            yield f"initial values: {name} is off by more than {MOVED:g} times what training moves it by"


def _of_factor(evidence: Evidence, name: str) -> Iterator[str]:
    """Hint about a factor on all that is wrong of the first tensor, if it is a size of the case, or sizes."""
    if name not in evidence.truth or independent([evidence.truth[name]]) < FEWEST_OF_A_FACTOR:
        return
    factors, wrong, right = list[float](), set[int](), set[int]()
    truth, near = evidence.truth[name].double(), share_left(evidence.truth[name])
    for rank, blocks in blocks_of(evidence, name).items():
        for block in (block for block in blocks if block.local.numel()):
            x, t = block.local.double().flatten(), block.part_of(truth).flatten()
            near = share_left(block.local)
            if block.reduce_op or not float((x - t).norm()) > near * float(t.norm()):
                right.add(rank)
                continue
            factor = float(x @ t) / float(t @ t) if bool(t.any()) else 0.0
            if not float((x - factor * t).norm()) <= near * float((x - t).norm()):
                return
            factors.append(factor)
            wrong.add(rank)
    alike = factors and math.isclose(min(factors), max(factors), rel_tol=near)
    if alike and (sizes := sizes_of(evidence, factors[0], near)):
        where = f"on rank{'s' * (len(wrong) > 1)} {ranks_text(sorted(wrong))} " if right - wrong else ""
        yield f"{where}{name} is {in_words(factors[0])} the truth, which is {sizes}"


def _of_update(evidence: Evidence, first: First, wrong: Sequence[str]) -> Iterator[str]:
    """The factor on an update that is the first that is wrong, though its gradients are right."""
    step = max(first.step, 0)
    known = {name for name in evidence.merged.tensors if kind_of(name) == "grad" and not step} | {f"grad_norm/{step}"}
    is_update = kind_of(first.name) not in ("logits", "value_after")  # other data, or no optimizer's state
    if first.phase != "step" or not is_update or not known & {*evidence.merged.tensors} or known & {*wrong}:
        return
    state = moved(evidence, wrong, "param", step)
    factor = times(state.got, state.right) if state and independent([state.right]) >= FEWEST_OF_A_FACTOR else None
    if factor is not None:
        yield f"the updates of step {step} are {in_words(factor)} the right ones"
