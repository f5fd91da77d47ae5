"""Explanations of wrong tensors: the dense model taken apart or read otherwise, and the subject in another case."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from harness.checking.evidence import Evidence
from harness.checking.measures.kinds import kind_of
from harness.dense_model import Tried
from harness.errors import error_text
from harness.protocols import CaseLike
from harness.running.trials.runs import recorded
from harness.running.trials.trial import Trial
from harness.running.trials.watched import watched
from harness.subject import refusal


def with_what_ifs(trial: Trial, evidence: Evidence, wrong: Collection[str]) -> Evidence:
    """Evidence with explanations of these wrong names: gradients taken apart, data read otherwise."""
    kinds, model = {kind_of(name) for name in wrong}, trial.reference.model
    if model is None:
        return evidence
    shares: Mapping[str, Tensor] = {}
    tried: list[Tried] = []

    def what_ifs(case: CaseLike, device: torch.device, **given: Any) -> Mapping[str, Tensor]:
        for rule in (rule for rule in model.what_ifs() if rule.explains & kinds):
            tried.append(Tried(rule, rule.readings(case, device, **given)))  # noqa: PERF401  (kept if a later one raises)
        return {}

    try:
        if kinds & {"grad", "param", "param_after", "exp_avg_after", "grad_norm", "tokens", "act", "loss"}:
            shares = trial.dense(model.shares, part="explained")
        trial.computed(what_ifs, part="explained")
    except Exception as problem:  # the failure stands; less of it is explained, and that is said
        trial.problems["explanation"] = f"the dense model raised while a cause was looked for: {error_text(problem)}"
    return replace(evidence, shares=shares, what_ifs=tuple(tried))


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
