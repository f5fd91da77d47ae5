"""The check of a save (`saved/<name>`): the files hold, bit for bit, what the ranks hold under that name.

A subject that saves a checkpoint returns `saved/param/<parameter>` and, of its optimizer, `saved/exp_avg_after/<last
step>/<parameter>` and so on: full tensors, read from the files by another reader than the one that loads them where
there is one. What the ranks hold is merged from their own shards, and held against the dense model by `update`: so a
save that writes a tensor in a wrong order is seen where it is written, though a load that reads it alike would undo it.
"""

from __future__ import annotations

from harness.checking.evidence import FAIL, PASS, UNKNOWN, Evidence, Finding
from harness.checking.tolerance import kind_of
from harness.merging import differing, same_bits

__all__ = ["saved"]

KIND = "saved"


def saved(evidence: Evidence) -> Finding | None:
    """Whether a checkpoint holds what the ranks hold; None where no rank returned what it holds."""
    names = [name for name in evidence.returned if kind_of(name) == KIND]
    if not names:
        return None
    ordered = [name for name in evidence.truth if name in names] or sorted(names)
    merged = evidence.merged.tensors
    pairs = {name: (merged.get(name), merged.get(name.partition("/")[2])) for name in ordered}
    known = {name: (files, ranks) for name, (files, ranks) in pairs.items() if files is not None and ranks is not None}
    unseen = tuple(name for name in ordered if name not in known)
    wrong = [name for name, (files, ranks) in known.items() if not same_bits(files, ranks)]
    if wrong:
        files, ranks = known[wrong[0]]
        message = f"{wrong[0]}: the files of the checkpoint and the ranks differ {differing(files, ranks)}"
        return Finding(verdict=FAIL, message=message, unchecked=unseen, names=tuple(wrong))
    if not known:
        return Finding(verdict=UNKNOWN, message="the ranks returned nothing that was saved", unchecked=unseen)
    message = f"{len(known)} tensors of the checkpoint are those of the ranks in every bit"
    return Finding(verdict=PASS, message=message, unchecked=unseen)
