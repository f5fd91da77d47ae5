"""Origins of wrong parameters: never updated, with an old gradient, or wrong from the start.

Weights before the first step are `Evidence.shares`' "start/<parameter>". Tested on numbers, as everywhere.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from shardproof.harness.checking.evidence import Evidence
from shardproof.harness.checking.measures.kinds import kind_of
from shardproof.harness.diagnosing.causes.cause import Cause, claimed
from shardproof.harness.diagnosing.causes.hypothesis import LATER, STATE, Failure, Hypothesis
from shardproof.harness.diagnosing.causes.places import is_cut
from shardproof.harness.diagnosing.causes.proofs import Explained
from shardproof.harness.diagnosing.hypotheses.optimizer.moved import moved
from shardproof.harness.diagnosing.hypotheses.patterns import by_size, nearest_parts
from shardproof.harness.mesh_axes import split_axes

MOVED = 0.2
"""Training moves a weight by less than this share of what another part of it differs by."""


def never_updated(evidence: Evidence, wrong: Sequence[str]) -> list[Cause]:
    """Whether the wrong parameters, or some of them, are what they were before the first step."""
    known, tensors, truth = _starts(evidence, wrong), evidence.merged.tensors, evidence.truth
    first = {n: Explained(value=tensors[n], truth=truth[n], guess=start, names=(n,)) for n, (_, start) in known.items()}
    if causes := claimed("never_updated", "the parameters are what they were before the first step", *first.values()):
        return causes
    still = [n for n, (value, start) in known.items() if torch.equal(value, start) and first[n].holds]
    words = f"{', '.join(still[:3])}{' ...' if len(still) > 3 else ''}: as before the first step, others moved"
    return claimed("never_updated", words, *(first[n] for n in still))


def not_zeroed(evidence: Evidence, wrong: Sequence[str]) -> list[Cause]:
    """Whether the wrong parameters were updated with the first step's gradient once more."""
    truth, known = evidence.truth, _starts(evidence, wrong) if evidence.case.steps > 1 else {}
    words = "the update holds the gradient of the first step once more"
    gradients = {n: truth.get(n.replace("param/", "grad/", 1)) for n in known}
    old = {n: gradient.double() for n, gradient in gradients.items() if gradient is not None}
    if len(old) < len(known):
        return []
    along = (_along(n, value, truth[n].double(), old[n]) for n, (value, _) in known.items())
    return claimed("not_zeroed", words, *along)


def _starts(evidence: Evidence, wrong: Sequence[str]) -> dict[str, tuple[Tensor, Tensor]]:
    """Wrong parameters -> their values, and those before the first step, where both are known."""
    starts = {n: evidence.shares.get(n.replace("param/", "start/", 1)) for n in wrong if kind_of(n) == "param"}
    known = evidence.merged.tensors
    return {n: (known[n].double(), x.double()) for n, x in starts.items() if x is not None and n in known}


def from_start(evidence: Evidence, wrong: Sequence[str]) -> list[Cause]:
    """Whether a weight began as another rank's part of itself: training moves it little, parts differ much."""
    for name, (value, start) in _starts(evidence, wrong).items():
        for dim in range(start.dim()):
            axes = {axis: n for axis, n in split_axes(evidence.case).items() if is_cut(evidence, name, axis, dim)}
            for axis, size in by_size(axes):
                if start.shape[dim] % size:
                    continue
                other, swaps = nearest_parts(value, start, dim, size)
                words = f"{name} began with the wrong parts of {size} along dim {dim} ({axis}): {swaps}"
                began = Explained(value=value, truth=start, guess=other, left=MOVED, names=(name,), fitted=size)
                if causes := claimed("other_shard", words, began):
                    return causes
    return []


def _along(name: str, value: Tensor, truth: Tensor, old: Tensor) -> Explained:
    """Error as some factor times an old gradient: which one depends on what sums it went through."""
    power = float(old.square().sum())
    share = float(((value - truth) * old).sum()) / power if power else 0.0
    return Explained(value=value, truth=truth, guess=truth + share * old, left=2e-3, names=(name,), fitted=1)


def _of_own_module(failure: Failure) -> list[Cause]:
    """A weight that was wrong from the start, that of the first wrong module before others."""
    own = f"param/{failure.first.partition('/')[2]}."
    return from_start(failure.evidence, sorted(failure.numbers, key=lambda name: not name.startswith(own)))


def _parameters(failure: Failure) -> list[str]:
    return failure.of_kind("param")


def _of_all_steps(failure: Failure) -> list[str]:
    """The wrong parameters, where their state before the last step is not known: else `steps` speaks of that one."""
    parameters, last = _parameters(failure), failure.evidence.case.steps - 1
    known = failure.kind == STATE and moved(failure.evidence, failure.numbers, "param", last) is not None
    return [] if known else parameters


_of_parameters = partial(Hypothesis, kinds=frozenset({LATER, STATE}))
HYPOTHESES = (
    _of_parameters(
        predicts="parameters as they were before the first step",
        causes=lambda failure: never_updated(failure.evidence, _of_all_steps(failure)),
    ),
    _of_parameters(
        predicts="a parameter that began as another rank's part of itself",
        causes=lambda failure: from_start(failure.evidence, _parameters(failure)),
    ),
    _of_parameters(
        predicts="parameters that hold the first gradient once more",
        causes=lambda failure: not_zeroed(failure.evidence, _of_all_steps(failure)),
    ),
    Hypothesis(
        predicts="a parameter that began as another rank's part, behind what is computed of it",
        causes=_of_own_module,
        kinds=frozenset({"act"}),
    ),
)
