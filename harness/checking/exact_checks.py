"""Checks before any number is compared: facts about the data, how shards merge, and replicas. No tolerance anywhere."""

from __future__ import annotations

from torch import Tensor

from harness.checking.evidence import FAIL, PASS, Evidence, Finding
from harness.checking.measures.kinds import kind_of
from harness.outcome.merging import Flaw

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
    wrong = {name: pair for name, pair in facts.pairs.items() if not _same(*pair)}
    broken = [f"{name}: {_difference(*pair)}" for name, pair in wrong.items()]
    if broken:
        more = f"; {len(broken) - 1} more of {len(facts.pairs)} statements are wrong" if len(broken) > 1 else ""
        message = f"the data are wrong for truth and ranks alike: {broken[0]}{more}"
        return Finding(verdict=FAIL, message=message, unchecked=facts.unchecked, phase="data")
    message = f"{len(facts.pairs)} statements about the data hold; {facts.reading}"
    return Finding(verdict=PASS, message=message, unchecked=facts.unchecked)


def _same(values: Tensor, must: Tensor) -> bool:
    return values.shape == must.shape and bool((values == must).all())


def _difference(tensor: Tensor, must: Tensor) -> str:
    """Both in full when they are short; else where they differ."""
    if max(tensor.numel(), must.numel()) <= _SHOWN or tensor.shape != must.shape:
        return f"{_start(tensor)}, must be {_start(must)}"
    wrong = (tensor != must).flatten()
    at = int(wrong.int().argmax())
    values = (int(each.flatten()[at]) for each in (tensor, must))
    return (
        "element {} is {}, must be {}".format(at, *values) + f"; {int(wrong.sum())} of {must.numel()} elements differ"
    )


def _start(tensor: Tensor) -> str:
    values = tensor.flatten().tolist()
    shown = f"{values[:_SHOWN]}"[:-1] + (", ...]" if len(values) > _SHOWN else "]")
    return shown if tensor.dim() else str(tensor.item())


def layout(evidence: Evidence) -> Finding | None:
    """Whether the blocks of every name make one full tensor of the truth's shape: nothing missing, nothing twice."""
    return _flaws(
        evidence, [flaw for flaw in evidence.merged.flaws if flaw.kind != "replica conflict"], "tensors merge"
    )


def replicas(evidence: Evidence) -> Finding | None:
    """Whether everything that several ranks hold is the same on all of them, bit for bit; choices of experts are the
    check `routing`.
    """
    conflicts = [
        flaw for flaw in evidence.merged.flaws if flaw.kind == "replica conflict" and kind_of(flaw.name) != "routing"
    ]
    return _flaws(evidence, conflicts, "tensors have equal replicas")


def _flaws(evidence: Evidence, flaws: list[Flaw], praise: str) -> Finding | None:
    names = evidence.returned
    if not names:
        return None
    other = tuple(flaw.name for flaw in evidence.merged.flaws if flaw not in flaws)
    if not flaws:
        return Finding(verdict=PASS, message=f"{len(names) - len(other)} {praise}", unchecked=other)
    first = flaws[0]
    return Finding(
        verdict=FAIL,
        message=f"{first.name} has a flaw, {first.kind}: {first.message}",
        unchecked=other,
        names=tuple(flaw.name for flaw in flaws),
        ranks=first.ranks,
    )
