"""Origins of wrong parameters: never updated, with an old gradient, or wrong from the start.

Weights before the first step are `Evidence.shares`' "start/<parameter>". Tested on numbers, as everywhere.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from harness.checking.evidence import Evidence
from harness.checking.measures.kinds import kind_of
from harness.diagnosing.rules.causes import Cause, claimed
from harness.diagnosing.rules.proofs import Explained
from harness.mesh_axes import split_axes

MOVED = 0.2
"""Training moves a weight by less than this share of what another part of it differs by."""


def from_updates(evidence: Evidence, wrong: Sequence[str]) -> list[Cause]:
    """Causes of wrong parameters: never updated, or updated with an old gradient."""
    names = [n for n in wrong if kind_of(n) == "param" and n in evidence.merged.tensors]
    starts = {n: evidence.shares.get(n.replace("param/", "start/", 1)) for n in names}
    known = {n: start.double() for n, start in starts.items() if start is not None}
    if not known:
        return []
    value = {n: evidence.merged.tensors[n].double() for n in known}
    first = {
        n: Explained(value=evidence.merged.tensors[n], truth=evidence.truth[n], guess=start)
        for n, start in known.items()
    }
    if causes := claimed("never_updated", "the parameters are what they were before the first step", *first.values()):
        return causes
    still = [n for n, start in known.items() if torch.equal(value[n], start) and first[n].holds]
    words = f"{', '.join(still[:3])}{' ...' if len(still) > 3 else ''}: as before the first step, others moved"
    if causes := claimed("never_updated", words, *(first[n] for n in still)):
        return causes
    if loaded := _loaded(evidence, {n: (value[n], start) for n, start in known.items()}):
        return loaded
    old = {n: evidence.truth[n.replace("param/", "grad/", 1)].double() for n in known}
    words = "the update holds the gradient of the first step once more: gradients are not set to zero in between"
    along = (_along(value[n], evidence.truth[n].double(), old[n]) for n in known)
    return claimed("not_zeroed", words, *along) if evidence.case.steps > 1 else []


def from_start(evidence: Evidence, wrong: Sequence[str]) -> list[Cause]:
    """Causes of wrong parameters by the weights before the first step."""
    starts = {n: evidence.shares.get(n.replace("param/", "start/", 1)) for n in wrong if kind_of(n) == "param"}
    tensors = evidence.merged.tensors
    return _loaded(
        evidence,
        {n: (tensors[n].double(), start.double()) for n, start in starts.items() if start is not None and n in tensors},
    )


def _loaded(evidence: Evidence, of_name: Mapping[str, tuple[Tensor, Tensor]]) -> list[Cause]:
    """Whether a weight began as another rank's part of itself: training moves it little, parts differ much."""
    for name, (value, start) in of_name.items():
        for axis, size in split_axes(evidence.case).items():
            for dim in (dim for dim in range(start.dim()) if start.shape[dim] % size == 0):
                mine, theirs = value.chunk(size, dim), start.chunk(size, dim)
                taken = [min(range(size), key=lambda j: float((x - theirs[j]).norm())) for x in mine]
                swaps = ", ".join(f"{j} in place of {i}" for i, j in enumerate(taken) if i != j)
                words = f"{name} began with the wrong parts of {size} along dim {dim} ({axis}): {swaps}"
                other = torch.cat([theirs[j] for j in taken], dim)
                began = Explained(value=value, truth=start, guess=other, left=MOVED)
                if causes := claimed("other_shard", words, began):
                    return causes
    return []


def _along(value: Tensor, truth: Tensor, old: Tensor) -> Explained:
    """Error as some factor times an old gradient: which one depends on what sums it went through."""
    power = float(old.square().sum())
    share = float(((value - truth) * old).sum()) / power if power else 0.0
    return Explained(value=value, truth=truth, guess=truth + share * old, left=2e-3)
