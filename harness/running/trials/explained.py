"""What explains wrong tensors: the dense model taken apart or read otherwise, and the same subject in another case."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from torch import Tensor

from harness.checking.evidence import Evidence
from harness.checking.measures.kinds import kind_of
from harness.errors import error_text
from harness.protocols import CaseLike
from harness.running.trials.runs import recorded
from harness.running.trials.trial import Trial
from harness.running.trials.watched import watched
from harness.subject import refusal


def with_what_ifs(trial: Trial, evidence: Evidence, wrong: Collection[str]) -> Evidence:
    """The same evidence with what explains these wrong names: gradients taken apart, data read otherwise."""
    kinds, model = {kind_of(name) for name in wrong}, trial.reference.model
    if model is None:
        return evidence
    shares: Mapping[str, Tensor] = {}
    what_if: dict[str, Tensor] = {}
    try:
        if kinds & {"grad", "param", "param_after", "exp_avg_after", "grad_norm", "tokens", "act", "loss"}:
            shares = trial.dense(model.shares, part="explained")
        if kinds & {"act", "logits", "loss", "grad"}:
            what_if |= trial.dense(model.alternatives, part="explained")
        if "act" in kinds:
            what_if |= trial.dense(model.rules, part="explained")
        for kind, function in (("metric", model.metrics), ("param", model.trainings)):
            what_if |= trial.dense(function, part="explained") if kind in kinds else {}
    except Exception as problem:  # the failure stands; less of it is explained, and that is said
        trial.problems["explanation"] = f"the dense model raised while a cause was looked for: {error_text(problem)}"
    return replace(evidence, shares=shares, alternatives=what_if)


def elsewhere(trial: Trial, case: CaseLike, first: str) -> Evidence | None:
    """Evidence of the same subject in another case, as far as this tensor needs it; None when there is none."""
    other = replace(trial, case=case, seconds={}, problems={}, known={}, facts=[], given={})
    try:
        if refusal(case, trial.subject):
            return None
        with trial.timed("elsewhere"):
            seen = recorded(other)
            if kind_of(first) in ("act", "act_grad"):
                seen = watched(other, seen)
            return replace(seen, shares=other.dense(model.shares) if (model := trial.reference.model) else {})
    except Exception:  # then this case decides nothing
        return None
