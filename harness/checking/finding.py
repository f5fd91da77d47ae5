"""Findings: the results of checks. Errors are ratios; what checks read is in `records` beside this file."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardproof.harness.checking.measures.measured import Measured, epsilon
from shardproof.harness.verdicts.facts import Counts, Fact, Note, Worst
from shardproof.harness.verdicts.words import join_facts


def apart_by(dtype: str, name: str, spread: float) -> Worst:
    """The figures of a tensor whose replicas, or values in two runs, differ by this ratio and may not differ at all."""
    return Worst(name=name, error=spread, allowed=0.0, epsilons=spread / epsilon(dtype))


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The finding of a check: the verdict, what it states (`facts`), and what it could not check (`notes`).

    `names` are the wrong tensors, first the one that the facts are about. `worst` is the tensor or event closest to its
    limit or furthest beyond it; None if nothing is measured. `kind`: how calls differ ("missing"), "" if no calls are
    compared. `decided`: kind of name ("grad") -> how many tensors were found right or wrong, and of how many. `wrong`
    are the tensors beyond their limit. `phase` and `region` are the place, if the check knows it. `ranks` are the wrong
    ranks, empty if all are wrong or if it is unknown which.
    """

    verdict: str
    facts: tuple[Fact, ...]
    worst: Worst | None = None
    notes: tuple[Note, ...] = ()
    wrong: tuple[Measured, ...] = ()
    names: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    phase: str = ""
    region: str = ""
    kind: str = ""
    decided: Mapping[str, Counts] = field(default_factory=dict)

    @property
    def message(self) -> str:
        """The facts in words."""
        return join_facts(self.facts)
