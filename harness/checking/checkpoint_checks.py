"""The check of the files of a checkpoint: they hold what the ranks hold, bit for bit."""

from __future__ import annotations

from torch import Tensor

from harness.checking.evidence import FAIL, PASS, UNKNOWN, Evidence, Finding
from harness.checking.measures.kinds import kind_of
from harness.outcome.merging import differing, same_bits

_COUNTS = ("steps", "step_after", "loss_scale")
"""Kinds of saved/ that are counts."""


def saved(evidence: Evidence) -> Finding:
    """Whether the files of a checkpoint hold (`saved/<name>`), bit for bit, what the ranks hold under that name.

    They are full tensors, read by another reader than the one that loads them where there is one. What ranks hold is
    merged from their own shards and held against the dense model by `update`, so a save in a wrong order is seen where
    it is written, though a load that reads it alike would undo it. Counts that ranks do not return (steps, the state
    of the loss scale) are held against the truth, which rounding does not change.
    """
    names = [name for name in evidence.returned if kind_of(name) == "saved"]
    ordered = [name for name in evidence.truth if name in names] or sorted(names)
    merged = evidence.merged.tensors
    right = {name: merged.get(name.partition("/")[2], _counted(evidence, name)) for name in ordered}
    known = {name: (merged[name], must) for name, must in right.items() if must is not None and name in merged}
    unseen = tuple(name for name in ordered if name not in known)
    wrong = [name for name, (files, must) in known.items() if not same_bits(files, must)]
    if wrong:
        files, must = known[wrong[0]]
        whose = "the ranks" if wrong[0].partition("/")[2] in merged else "the truth"
        message = f"{wrong[0]}: the files of the checkpoint and {whose} differ {differing(files, must)}"
        return Finding(verdict=FAIL, message=message, unchecked=unseen, names=tuple(wrong))
    if not known:
        return Finding(verdict=UNKNOWN, message="the ranks returned nothing that was saved", unchecked=unseen)
    message = f"{len(known)} tensors of the checkpoint are those of the ranks in every bit"
    return Finding(verdict=PASS, message=message, unchecked=unseen)


def _counted(evidence: Evidence, name: str) -> Tensor | None:
    """What the truth counts under a name; None for a tensor that is no count."""
    return evidence.truth.get(name) if name.split("/")[1] in _COUNTS else None
