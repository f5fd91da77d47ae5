"""Cases that compute or send in a lower precision than their own dtype: as the subject states, or as it is found.

Only tensors beyond the limits of the case's own dtype are judged by those of the lower one, with control runs made in
it (harness.running.truth.control_modes). All others stay as they were judged. Where the subject states nothing and
errors are as small as a lower one's, the ranks are run once more and looked at. Does a number of a lower dtype
enter arithmetic of the case's dtype (an island)? If so on one rank too, it belongs to the model: its limits hold, and
the findings say where it is. If on several ranks alone, it is part of what is proved, and wrong. Where there is no such
case on one rank, the origin is unknown, and what its limits would admit is unknown.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from harness.checking.checks import LAWS, Check, examine
from harness.checking.evidence import PASS, UNKNOWN, Evidence, Finding
from harness.checking.measures.kinds import NUMERIC_KINDS, is_state, step_of
from harness.checking.measures.measured import Measured, epsilon
from harness.errors import MachineError, ProgramError, RequestError
from harness.protocols import CaseLike
from harness.recording.capturing.operator_probes import Island, NarrowProbe, Probed, narrower
from harness.running.trials.reference import Function
from harness.running.trials.trial import Trial
from harness.running.truth.control_modes import BOTH, Rounding
from harness.running.truth.own import OwnTruth, one_rank
from harness.subject import lower_dtypes, refusal, truth_of

Found = tuple[Evidence, dict[str, Finding]]
Judge = Callable[[Trial, Evidence, Mapping[str, Check]], Found]
"""Judge by the limits of one precision."""

_LARGEST: Mapping[str, float] = {"float32": 1e-3, "bfloat16": 0.5, "float16": 0.5}
"""The largest error for which a lower precision is looked for."""
_USUAL = 0.1
"""Share of the largest error up to which a lower precision is looked for where only the verdict counts."""

_GOLDEN = 0.618
"""Steps of this share of 1 come near no earlier one for long."""
_WHOLE = "float32"
"""Dtype of a case as a whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundedControl:
    """The function (case, device) -> outcome of a control run in a lower precision.

    Where everything is computed in float32 (in a float64 case), it is that of the case in float32, tables of positions
    included.
    """

    control: Function
    rounding: Rounding

    def __call__(self, case: CaseLike, device: torch.device, *, parts: int = 0, **words: Any) -> Mapping[str, Tensor]:
        """The outcome in this precision. Each number of `parts` rounds otherwise: runs that all round the same numbers
        alike would be one run.
        """
        rounds = partial(self.rounding.mode, 1 + parts * _GOLDEN % 1)
        if self.rounding.compute == _WHOLE:
            with suppress(ValueError):  # a subject whose cases have no such dtype
                case = case.but(dtype=_WHOLE)
        if isinstance(self.control, OwnTruth):  # rounds in the thread of its rank
            return replace(self.control, around=rounds)(case, device, parts=parts, **words)
        with rounds():
            return self.control(case, device, parts=parts, **words)


def wrong_of(findings: Mapping[str, Finding]) -> list[Measured]:
    """Every tensor that is beyond its limit."""
    return [measured for finding in findings.values() for measured in finding.wrong]


def stated(trial: Trial, evidence: Evidence) -> Rounding | None:
    """The lower precision that the subject states for this case; None without one.

    Calls in a lower dtype are read from the ledger: nothing is sent so without a call of that dtype.
    """
    dtypes = lower_dtypes(trial.case, trial.subject)
    compute, wire = dtypes.get("compute_dtype", ""), dtypes.get("wire_dtype", "")
    sent = {event.phase for event in evidence.events if event.dtype == wire and event.group_size > 1}
    passes = {"backward" if phase in ("backward", "grad_sync") else "forward" for phase in sent}
    if not compute and not passes:
        return None
    words = " and ".join(f"{name}={dtype}" for name, dtype in dtypes.items() if name != "wire_dtype" or passes)
    return Rounding(
        compute=compute,
        wire=wire if passes else "",
        passes=tuple(one for one in BOTH if one in passes),
        origin=f"errors below those of {{}} (the subject states {words})",
    )


def as_stated(trial: Trial, found: Found, checks: Mapping[str, Check], rounding: Rounding, judge: Judge) -> Found:
    """The findings, of tensors beyond the case's own limits by those of the precision that the subject states."""
    if not wrong_of(found[1]):
        return found
    seen, again = _lowered(trial, found, checks, rounding, judge)
    return seen, {
        name: finding if finding is found[1][name] else _noted(finding, seen, rounding.origin)
        for name, finding in again.items()
    }


def as_found(trial: Trial, found: Found, checks: Mapping[str, Check], judge: Judge) -> Found:
    """The findings by the limits of the lowest precision that the ranks compute with, where that may explain them."""
    evidence, findings = found
    own_dtype, wrong = evidence.case.dtype, wrong_of(findings)
    largest = max((measured.error for measured in wrong), default=0.0)
    share = _USUAL if trial.verdict_alone else 1.0
    looked_for = {dtype for dtype in narrower(own_dtype) if largest <= share * _LARGEST[dtype]}
    if not wrong or not looked_for or _stored_shorter(evidence, wrong, looked_for):
        return found
    constants = not _same_constants(trial)
    islands = [one for one in _islands(trial, trial.case, constants) if one.dtype in looked_for]
    if not islands:
        return found
    dense = _on_one_rank(trial, constants)
    own = [island for island in islands if dense is None or island.dtype in dense]
    lowest = max(own or islands, key=lambda island: epsilon(island.dtype))
    words = f"errors below those of {{}} (the {own_dtype} case uses {lowest})"
    seen, again = _lowered(trial, found, checks, Rounding(compute=lowest.dtype, origin=words), judge)
    if not own:
        return (evidence if wrong_of(again) else replace(evidence, island=str(lowest))), findings
    changed = {}
    for name, finding in again.items():
        if finding is findings[name]:
            changed[name] = finding
        elif dense is None and finding.verdict == PASS != findings[name].verdict:
            rule = f"within the limits of {lowest}; no case on one rank shows whether the model has it too"
            changed[name] = Finding(verdict=UNKNOWN, message=f"{findings[name].message}, {rule}")
        else:
            changed[name] = _noted(finding, seen, words)
    return seen, changed


def _lowered(trial: Trial, found: Found, checks: Mapping[str, Check], rounding: Rounding, judge: Judge) -> Found:
    """Judge failures again: the tensors that are beyond their limits by those of this precision."""
    evidence, findings = found
    control = RoundedControl(control=trial.reference.control, rounding=rounding)
    lower = replace(trial, reference=replace(trial.reference, control=control))
    failed = {name: checks[name] for name, finding in findings.items() if finding.wrong and name in checks}
    numbers = {name: check for name, check in failed.items() if name in NUMERIC_KINDS}
    laws = {name: check for name, check in failed.items() if name in LAWS}
    begun = replace(evidence, precision=rounding.precision, controls=(), far={}, kinks=(), slack={}, states=None)
    seen, _ = judge(lower, begun, {**numbers, **laws})
    beyond = frozenset(measured.name for name in numbers for measured in findings[name].wrong)
    judged = replace(evidence, lower=seen, beyond=beyond)
    return judged, {**findings, **examine(judged, numbers), **examine(seen, laws)}


def _noted(finding: Finding, seen: Evidence, words: str) -> Finding:
    """The finding with what its limits do not show."""
    lowest = seen.lower.dtype if seen.lower is not None else seen.dtype
    return replace(finding, unchecked=(*finding.unchecked, words.format(lowest)))


def _stored_shorter(evidence: Evidence, wrong: Sequence[Measured], dtypes: set[str]) -> bool:
    """Whether the first step is right in the case's dtype, and a later state or a gradient was rounded when stored.

    Rounded to be sent counts too. Each of its numbers is one of such a dtype, and the truth's are not. No arithmetic of
    the model explains that, but for gradients in float32, in which many programs add them up.
    """
    states = {one.name for one in wrong if is_state(one.name) or one.name.startswith("param/")}
    gradients = {one.name for one in wrong if one.name.startswith(("grad/", "grad_norm/"))}
    first = {one.name for one in wrong if in_first_step(one.name)} - states
    for dtype in dtypes:
        kept = states if dtype == "float32" else states | gradients
        if first <= kept and any(_only_in(evidence, name, getattr(torch, dtype)) for name in kept):
            return True
    return False


def _only_in(evidence: Evidence, name: str, short: torch.dtype) -> bool:
    """Whether each number of a tensor is one of this dtype, and those of the truth are not."""
    own, truth = evidence.merged.tensors[name], evidence.truth.get(name)
    return truth is not None and own.equal(own.to(short).to(own)) and not truth.equal(truth.to(short).to(truth))


def in_first_step(name: str) -> bool:
    """Whether a tensor is of the first step, before the optimizer: neither states nor training come into it."""
    named = name.startswith(("act/", "act_grad/", "grad/"))
    return named or (step_of(name) == 0 and not is_state(name))


def _on_one_rank(trial: Trial, constants: bool) -> set[str] | None:
    """The lower precisions that the subject computes with on one rank, None where it has no such case."""
    try:
        case = one_rank(trial.case, trial.subject)
        return None if refusal(case, trial.subject) else {each.dtype for each in _islands(trial, case, constants)}
    except RequestError:
        return None


def _islands(trial: Trial, case: CaseLike, constants: bool) -> list[Island]:
    """Where the ranks of a case compute with a lower precision; none where they cannot be looked at.

    `constants`: whether numbers count that were not computed in the case's dtype.
    """
    try:
        run = trial.run(Probed(trial.subject, partial(NarrowProbe, case.dtype, constants=constants)), case)
    except (ProgramError, MachineError):  # a program that a dispatch mode disturbs: its errors stand
        return []
    return [Island.read(name) for name in dict.fromkeys(name for outcome in run.outcomes for name in outcome)]


def _same_constants(trial: Trial) -> bool:
    """Whether constants of a lower precision are those of the truth: the subject's own code, or a dense model that
    has such ones too.
    """
    dense = truth_of(trial.subject)
    if dense is None or isinstance(dense, str):
        return dense is not None
    with NarrowProbe(trial.case.dtype) as probe:
        trial.computed(trial.reference.truth)
    return bool(probe.found)
