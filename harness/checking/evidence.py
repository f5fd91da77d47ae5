"""Findings and verdicts: what a check answers, and how it is stored. Errors are ratios.

`epsilons` count errors in the machine epsilon of a dtype. What checks read is in `records` beside this file.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardproof.harness.checking.measures.measured import Measured, epsilon

PASS, FAIL, UNKNOWN, SKIP = "pass", "fail", "unknown", "skip"
"""`skip` is the word of a case that the subject does not claim; no check ever answers it."""
Decided = tuple[int, int]
"""How many tensors of a kind were decided (found right or wrong), and how many the kind has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Worst:
    """The tensor (or event) that came closest to its limit or went furthest beyond it."""

    name: str
    error: float
    allowed: float
    epsilons: float


def apart_by(dtype: str, name: str, spread: float) -> Worst:
    """The figures of a tensor whose replicas, or values in two runs, are apart by this ratio: nothing is allowed."""
    return Worst(name=name, error=spread, allowed=0.0, epsilons=spread / epsilon(dtype))


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Finding of one check: the answer, one line of words, and what it could not look at (`unchecked`).

    `names` are those of wrong tensors, the one in question first. `worst` is the tensor or event closest to its limit
    or furthest beyond it; None where nothing is measured.
    `decided`: kind of name ("grad") -> how many tensors were found right or wrong, and of how many. `wrong` are the
    tensors beyond their limit; `phase` and `region` are the place where the check knows it. `ranks` are the
    ranks that are wrong, empty when it is all of them or unknown.
    """

    verdict: str
    message: str
    worst: Worst | None = None
    unchecked: tuple[str, ...] = ()
    wrong: tuple[Measured, ...] = ()
    names: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    phase: str = ""
    region: str = ""
    decided: Mapping[str, Decided] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A check on one case, as `verdicts.jsonl` stores it; a failure's message has the six lines.

    `case` is the text of the case, `check` the name of the check. All else is that of its finding.
    """

    case: str
    check: str
    verdict: str
    worst: Worst | None = None
    message: str
    unchecked: tuple[str, ...] = ()
    decided: Mapping[str, Decided] = field(default_factory=dict)
