"""Hypotheses: mistakes that may explain a failure, each with its predictions, ranked by how much they explain.

Those of this system are in `harness.diagnosing.hypotheses`. No cause is made from numbers that contradict it
(`causes.cause`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from shardproof.harness.checking.finding import Finding
from shardproof.harness.checking.measures.kinds import is_state, kind_of
from shardproof.harness.checking.records import Evidence
from shardproof.harness.diagnosing.causes.cause import Cause
from shardproof.harness.differences import Difference

LATER = "later"
"""Logits, a loss or a norm of a later step: they follow from the parameters before it."""
OF_TOKENS = "loss of wrong tokens"
"""A loss that is divided by a wrong number of tokens."""
STATE = "state"
"""A parameter or a moment after a step."""
OTHER = "other"
_KNOWN = frozenset({"init", "mask", "act", "logits", "loss", "act_grad", "grad", "tokens", "grad_norm"})
VALUES = frozenset({"init", "act", "logits", "loss", "act_grad", "grad", OTHER})
"""Kinds of tensors that are computed from others of their step, and are no counts, norms or states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Evidence of a failed case, and its wrong tensors.

    wrong       all wrong names in the order of computation
    numbers     the wrong names that can be compared with a truth
    findings    check -> its finding
    parted      the first difference of the ledger from the expectation; None where there is none
    call_first  whether that difference comes before the first wrong tensor
    """

    evidence: Evidence
    wrong: Sequence[str]
    numbers: Sequence[str]
    findings: Mapping[str, Finding] = field(default_factory=dict)
    parted: Difference | None = None
    call_first: bool = False

    @property
    def first(self) -> str:
        """The first wrong name with a truth, or ""."""
        return self.numbers[0] if self.numbers else ""

    @property
    def kind(self) -> str:
        """The kind of the first wrong tensor: the kind of its name, or one of the constants of this file."""
        kind, from_start = kind_of(self.first), self.evidence.truth.controls.states is None
        if kind in ("logits", "loss", "grad_norm") and not self.first.endswith("/0") and from_start:
            return LATER
        if kind == "loss" and "tokens/0" in self.numbers:
            return OF_TOKENS
        return STATE if kind == "param" or is_state(self.first) else kind if kind in _KNOWN else OTHER

    @property
    def alike(self) -> list[str]:
        """The wrong names of the same kind as the first."""
        return self.of_kind(kind_of(self.first))

    @property
    def torn(self) -> bool:
        """Whether ranks disagree on the first wrong tensor."""
        return bool(self.first) and self.first not in self.evidence.run.tensors

    @property
    def value(self) -> Tensor | None:
        """The first wrong tensor; None if ranks disagree on it."""
        return self.evidence.run.tensors.get(self.first)

    @property
    def whole(self) -> list[str]:
        """The first wrong name, and if that is a gradient all wrong gradients, as far as ranks agree on them; empty if
        ranks disagree on the first.
        """
        names = self.alike if self.kind == "grad" else self.alike[:1]
        return [] if self.torn else [name for name in names if name in self.evidence.run.tensors]

    def of_kind(self, kind: str) -> list[str]:
        """The wrong names of a kind."""
        return [name for name in self.numbers if kind_of(name) == kind]


def of_values(find: Callable[[Evidence, Sequence[str]], list[Cause]]) -> Callable[[Failure], list[Cause]]:
    """The causes that `find` finds in wrong values on which ranks agree, each in the dtype by which it is judged."""
    return lambda failure: find(_as_judged(failure.evidence, names), names) if (names := failure.whole) else []


def _as_judged(evidence: Evidence, names: Sequence[str]) -> Evidence:
    """The evidence with these tensors in the dtype by which they are judged, if they are stored in a wider one."""
    run = evidence.run
    dtypes = {name: getattr(torch, run.dtype_of(name)) for name in names}
    tensors = {name: run.tensors[name] for name in names if evidence.truth.tensors[name].is_floating_point()}
    wider = {n: t.to(dtypes[n]) for n, t in tensors.items() if torch.finfo(t.dtype).eps < torch.finfo(dtypes[n]).eps}
    return replace(evidence, run=run.with_tensors({**run.tensors, **wider})) if wider else evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class Hypothesis:
    """A mistake that may explain a failure. `predicts` states what it does to the tensors that it affects.

    `causes` returns the causes whose predictions hold, or []. It is called if the first wrong tensor is of one of the
    `kinds`.
    """

    predicts: str
    causes: Callable[[Failure], list[Cause]]
    kinds: frozenset[str]
