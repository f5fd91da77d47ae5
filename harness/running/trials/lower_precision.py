"""Cases that compute or send in a lower precision than their own dtype, which the subject declares or a run shows.

How far a lower precision may take a right result from the truth is measured. The ranks are run again with every number
of that precision multiplied by a random factor of the size of its rounding, so that their tensors move. Each tensor
that is beyond the limit of the case's own dtype gets control runs which differ from the truth by these movements. So a
tensor that the precision does not reach keeps its limit, and so does every tensor that was right without it.

If the subject declares nothing, and errors are as small as rounding to a lower dtype makes them, another run of the
ranks shows whether numbers of a lower dtype enter arithmetic of the case's dtype. If they do so on one rank too, and a
tensor moves with them there, the model rounds on the way to this tensor. If they do so on several ranks alone, or what
is rounded on one rank reaches no such tensor there, the parallel code rounds, which is a bug. For example, a state that
is sent in bfloat16 to the next context rank is rounded on one rank too, where no rank receives it. If the subject has
no case on one rank, this cannot be decided: tensors that are right only within the wider limits are unknown.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardproof.harness.checking.checks import LAWS, Check, run_checks
from shardproof.harness.checking.finding import Finding
from shardproof.harness.checking.measures.kinds import NUMERIC_KINDS, is_state, kind_of, step_of
from shardproof.harness.checking.measures.measured import Measured, epsilon
from shardproof.harness.checking.measures.tolerance import CONTROL_FACTOR
from shardproof.harness.checking.measuring import MOVED
from shardproof.harness.checking.records import Calls, Evidence, LowerPrecision, RecordedRun, Truth, merged_outcomes
from shardproof.harness.errors import MachineError, ProgramError, RequestError
from shardproof.harness.outcome.blocks import Block
from shardproof.harness.outcome.merging import Outcomes, same_bits
from shardproof.harness.protocols import CaseLike, Value
from shardproof.harness.recording.capturing.operator_probes import Island, NarrowProbe, Probed, narrower
from shardproof.harness.running.ranks.watching import Execution
from shardproof.harness.running.trials.trial import Trial
from shardproof.harness.running.truth.random_rounding import RandomRounding
from shardproof.harness.subject import NamedSubject, OnRanks, call_subject, lower_dtypes, one_rank, refusal, truth_of
from shardproof.harness.verdicts.facts import Note, NoteKind, state_fact
from shardproof.harness.verdicts.verdict import PASS, UNKNOWN

Found = tuple[Evidence, dict[str, Finding]]
MOVED_RUNS, AMPLIFIED_RUNS = 6, 3
"""How many runs move the ranks' lower precision by its rounding, and how many by CONTROL_FACTOR times as much."""

_LARGEST: Mapping[str, float] = {"float32": 1e-3, "bfloat16": 0.5, "float16": 0.5}
"""Dtype -> the largest error that rounding to it may explain. For a larger error the dtype is not looked for."""
_USUAL = 0.1
"""The share of _LARGEST that rounding usually stays below. It is the limit in experiments, whose time is short."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredPrecision:
    """The lower precision that a subject states: its dtypes, and the statement in words."""

    dtypes: frozenset[str]
    origin: str


@dataclass(frozen=True, slots=True)
class _Moved:
    """A subject whose numbers of these dtypes are moved by a random part of `factor` times their rounding."""

    subject: NamedSubject
    dtypes: frozenset[str]
    seed: int
    factor: float

    def __getattr__(self, attribute: str) -> Any:
        """Take any other attribute from the subject."""
        return getattr(self.subject.call, attribute)  # session, per_rank

    def __call__(self, case: Any, device: torch.device) -> Mapping[str, Value]:
        """Run the subject with its numbers moved."""
        units = {getattr(torch, dtype): self.factor * epsilon(dtype) for dtype in self.dtypes}
        with RandomRounding(units, seed=self.seed, leaving=True):
            return call_subject(self.subject.call, case, device)


def wrong_of(findings: Mapping[str, Finding]) -> list[Measured]:
    """Every tensor that is beyond its limit."""
    return [measured for finding in findings.values() for measured in finding.wrong]


def declared_precision(trial: Trial, calls: Calls) -> DeclaredPrecision | None:
    """The lower precision that the subject declares for this case; None without one.

    A `wire_dtype` counts only if the ledger has such a call of that dtype: otherwise nothing was rounded to be sent. If
    a call has such a dtype that is not declared for it, no declaration counts.
    """
    dtypes = lower_dtypes(trial.case, trial.subject)
    sent = {(each.dtype, each.op, f"{each.op} over {each.axis}") for each in calls.events if each.group_size > 1}
    known = {
        stated: [call for call in sent if call[0] == dtype and stated[1] in ("", *call[1:])]
        for stated, dtype in dtypes.items()
        if stated[0] == "wire_dtype"
    }
    meant = {call for of_one in known.values() for call in of_one}
    if any(call[0] in {dtypes[stated] for stated in known} for call in sent - meant):
        return None
    dtypes = {stated: dtype for stated, dtype in dtypes.items() if known.get(stated, True)}
    words = " and ".join(f"{name}={dtype}{calls and f' of {calls}'}" for (name, calls), dtype in dtypes.items())
    origin = f"the subject states {words}"
    return DeclaredPrecision(dtypes=frozenset(dtypes.values()), origin=origin) if dtypes else None


def rejudge_declared(trial: Trial, found: Found, checks: Mapping[str, Check], precision: DeclaredPrecision) -> Found:
    """The findings after tensors beyond their limits were judged by the precision that the subject declares."""
    if not wrong_of(found[1]):
        return found
    rejudged, again = _rejudge_by_movement(trial, found, checks, precision.dtypes)
    return rejudged, _changed_by(lambda _, after: _with_note(after, rejudged.run, precision.origin), found[1], again)


def rejudge_unseen(trial: Trial, found: Found, checks: Mapping[str, Check]) -> Found:
    """The findings beside a truth that computes outside of torch, as in numpy, judged by how rounding moves the ranks.

    Control runs of such a truth cannot be made to round, so only the ranks show how far rounding goes.
    """
    evidence, findings = found
    own = trial.reference.own
    if evidence.run.dtype == "float64" or own is None or not own.unseen.get(trial.text) or not wrong_of(findings):
        return found
    rejudged, again = _rejudge_by_movement(trial, found, checks, {evidence.run.dtype})
    words = "the truth computes outside of torch, so the ranks show how far rounding goes"
    return rejudged, _changed_by(lambda _, after: _with_note(after, rejudged.run, words), findings, again)


def rejudge_detected(trial: Trial, found: Found, checks: Mapping[str, Check]) -> Found:
    """The findings after a lower precision was looked for in the ranks, and tensors were judged by it.

    If the ranks use it and the model does not, the findings stay, and the operator is noted if it explains all of them.
    """
    evidence, findings = found
    wrong = wrong_of(findings)
    candidates = _dtypes_that_may_explain(trial, evidence.run.case.dtype, wrong)
    if not candidates or _stored_shorter(evidence.run, evidence.truth, wrong, candidates):
        return found
    constants = not _same_constants(trial)
    islands = [one for one in _islands(trial, trial.case, constants, trial.subject) if one.dtype in candidates]
    if not islands:
        return found
    of_model = _tensors_of_model(trial, constants, frozenset(measured.name for measured in wrong))
    shared = [island for island in islands if of_model is None or of_model.get(island.dtype)]
    lowest = max(shared or islands, key=lambda island: epsilon(island.dtype))
    dtypes = {island.dtype for island in shared or islands}
    reached = None if of_model is None or not shared else frozenset().union(*(of_model[dtype] for dtype in dtypes))
    rejudged, again = _rejudge_by_movement(trial, found, checks, dtypes, reached)
    if not shared:
        return (evidence if wrong_of(again) else evidence.with_found(low_precision_op=str(lowest))), findings

    def explain(before: Finding, after: Finding) -> Finding:
        if of_model is None and after.verdict == PASS != before.verdict:
            within = state_fact("within_lower", lower=str(lowest))
            return Finding(verdict=UNKNOWN, facts=(*before.facts, within))
        return _with_note(after, rejudged.run, f"the {evidence.run.case.dtype} case uses {lowest}")

    return rejudged, _changed_by(explain, findings, again)


def _dtypes_that_may_explain(trial: Trial, dtype: str, wrong: Sequence[Measured]) -> set[str]:
    """The dtypes lower than this one whose rounding may cause errors as large as these."""
    if not wrong:
        return set()
    # Movements of parameters do not count: an optimizer may make steps of any size from tiny gradients.
    largest = max((one.error for one in wrong if kind_of(one.name) not in MOVED), default=0.0)
    share = _USUAL if trial.verdict_alone else 1.0
    return {lower for lower in narrower(dtype) if largest <= share * _LARGEST[lower]}


def _changed_by(
    explain: Callable[[Finding, Finding], Finding], before: Mapping[str, Finding], after: Mapping[str, Finding]
) -> dict[str, Finding]:
    """The findings after a second judgement. Each one that it made anew becomes `explain(before, after)`."""
    return {name: one if one is before[name] else explain(before[name], one) for name, one in after.items()}


def _rejudge_by_movement(
    trial: Trial,
    found: Found,
    checks: Mapping[str, Check],
    dtypes: Iterable[str],
    reached: frozenset[str] | None = None,
) -> Found:
    """Judge tensors that are beyond their limits again, by how far rounding to these dtypes moves them.

    `reached`: those that the dtypes may reach; all without it.
    """
    evidence, findings = found
    again = {
        name: checks[name]
        for name, finding in findings.items()
        if finding.wrong and name in checks and (name in NUMERIC_KINDS or name in LAWS)
    }
    names = frozenset(measured.name for name in again for measured in findings[name].wrong)
    names = names if reached is None else names & reached
    move = partial(_run_moved, trial, evidence.run, evidence.truth, names, frozenset(dtypes))
    runs = [move(1 + number, 1.0) for number in range(MOVED_RUNS)]
    amplified = [move(MOVED_RUNS + 1 + number, CONTROL_FACTOR) for number in range(AMPLIFIED_RUNS)]
    controls = evidence.truth.controls
    controls = replace(controls, runs=(*controls.runs, *runs), amplified=(*controls.amplified, *amplified))
    rejudged = replace(
        evidence,
        run=replace(evidence.run, lower=LowerPrecision(dtype=max(dtypes, key=epsilon), names=names)),
        truth=replace(evidence.truth, controls=controls),
    )
    return rejudged, {**findings, **run_checks(rejudged, again)}


def _run_moved(
    trial: Trial,
    run: RecordedRun,
    truth: Truth,
    names: frozenset[str],
    dtypes: frozenset[str],
    seed: int,
    factor: float,
) -> dict[str, Tensor]:
    """A control run: the truth's tensors of these names, moved as those of the ranks move in one more run.

    Parameters before the step are among them, since updates are judged by how they move. Tensors whose blocks no longer
    merge are left out. Empty if the program fails under a dispatch mode.
    """
    watch = any(name in rank for rank in run.captured for name in names)
    call = _Moved(trial.subject, dtypes, seed, factor)
    try:
        with trial.time_part("again"):
            moved = trial.run(call, watch=watch)
    except (ProgramError, MachineError):
        return {}
    captured = tuple({name: rank[name] for name in rank if name in names} for rank in moved.captured)
    values = merged_outcomes(
        _with_equal_replicas(moved.outcomes), _with_equal_replicas(captured), truth.tensors
    ).tensors
    own, tensors = run.tensors, truth.tensors
    wanted = [name for name in values if name in tensors and (name in names or kind_of(name) in MOVED)]
    return {
        name: tensors[name] + (values[name].to(tensors[name]) - own[name].to(tensors[name]))
        for name in wanted
        if name in own
    }


def _with_equal_replicas(outcomes: Outcomes) -> Outcomes:
    """The outcomes with the first rank's numbers in all replicas, since every replica was moved at random by itself."""
    first: dict[tuple[object, ...], Block] = {}
    agreed = []
    for outcome in outcomes:
        own = {name: [(name, b.region, b.terms, b) for b in blocks] for name, blocks in outcome.items()}
        agreed.append({name: tuple(first.setdefault(key[:3], key[3]) for key in keys) for name, keys in own.items()})
    return tuple(agreed)


def _with_note(finding: Finding, run: RecordedRun, words: str) -> Finding:
    """The finding with a note on the lower precision by which it was judged."""
    note = Note(kind=NoteKind.LOWER_PRECISION, names=(run.lower.dtype,), reason=words)
    return replace(finding, notes=(*finding.notes, note))


def _stored_shorter(run: RecordedRun, truth: Truth, wrong: Sequence[Measured], dtypes: set[str]) -> bool:
    """Whether a state or a gradient was rounded when it was stored or sent, while the first step is right.

    Then every number of it, but not every number of the truth, fits a lower dtype, which arithmetic alone does not
    bring about. Gradients in float32 do not count, since many programs add them up in float32.
    """
    states = {one.name for one in wrong if is_state(one.name) or one.name.startswith("param/")}
    gradients = {one.name for one in wrong if one.name.startswith(("grad/", "grad_norm/"))}
    first = {one.name for one in wrong if in_first_step(one.name)} - states
    for dtype in dtypes:
        kept = states if dtype == "float32" else states | gradients
        if first <= kept and any(_only_in(run, truth, name, getattr(torch, dtype)) for name in kept):
            return True
    return False


def _only_in(run: RecordedRun, truth: Truth, name: str, short: torch.dtype) -> bool:
    """Whether this dtype holds every number of a tensor exactly, but not every number of the truth."""
    own, true = run.tensors[name], truth.tensors.get(name)
    if true is None or not own.is_floating_point():
        return False
    return own.equal(own.to(short).to(own)) and not true.equal(true.to(short).to(true))


def in_first_step(name: str) -> bool:
    """Whether a tensor is computed before the optimizer's first step, so that it has no error of an earlier step."""
    named = name.startswith(("act/", "act_grad/", "grad/"))
    return named or (step_of(name) == 0 and not is_state(name))


def _tensors_of_model(trial: Trial, constants: bool, wrong: frozenset[str]) -> dict[str, frozenset[str]] | None:
    """Lower dtype that enters arithmetic of the truth, if that is a subject, else of the subject on one rank -> those
    of these tensors that move there with the numbers of the dtype.

    A tensor that is not returned there counts as moved. None if there is no such case.
    """
    truth = truth_of(trial.subject)
    subject = truth.subject if isinstance(truth, OnRanks) else trial.subject
    try:
        case = truth.case_of(trial.case) if isinstance(truth, OnRanks) else one_rank(trial.case, subject)
        if refusal(case, subject):
            return None
    except RequestError:
        return None
    dtypes = {each.dtype for each in _islands(trial, case, constants, subject)}
    return {dtype: _find_moved(trial, case, subject, dtype, wrong) for dtype in dtypes}


def _find_moved(
    trial: Trial, case: CaseLike, subject: NamedSubject, dtype: str, names: frozenset[str]
) -> frozenset[str]:
    """Those of these tensors that move with the numbers of a dtype, or are not returned; all if a run fails."""
    moved = _Moved(subject, frozenset({dtype}), seed=1, factor=1.0)
    try:
        with trial.time_part("again"):
            plain, other = (_parts_of(trial.run(call, case, watch=True)) for call in (subject.call, moved))
    except (ProgramError, MachineError):  # a dispatch mode may break a program, which shows nothing about it
        return names
    returned = {name for name, *_ in plain}
    changed = {part[0] for part, tensor in plain.items() if part not in other or not same_bits(tensor, other[part])}
    return frozenset(name for name in names if name in changed or name not in returned)


def _parts_of(ran: Execution) -> dict[tuple[str, int, int], Tensor]:
    """Name, rank and number of a part -> the part, of all that ranks returned and of what was captured from them."""
    sides = [(rank, outcome) for side in (ran.outcomes, ran.captured) for rank, outcome in enumerate(side)]
    parts = (
        (name, rank, number, block)
        for rank, outcome in sides
        for name in outcome
        for number, block in enumerate(outcome[name])
    )
    return {(name, rank, number): block.local for name, rank, number, block in parts}


def _islands(trial: Trial, case: CaseLike, constants: bool, subject: NamedSubject) -> list[Island]:
    """The places where a lower dtype enters arithmetic of the case's dtype on any rank; [] if that run fails.

    `constants`: whether numbers count that were not computed in the case's dtype, such as tables in float32.
    """
    try:
        run = trial.run(Probed(subject, partial(NarrowProbe, case.dtype, constants=constants)), case)
    except (ProgramError, MachineError):  # the probe's dispatch mode may break a program, which shows nothing about it
        return []
    return [Island.read(name) for name in dict.fromkeys(name for outcome in run.outcomes for name in outcome)]


def _same_constants(trial: Trial) -> bool:
    """Whether the truth uses constants of a lower precision too: the subject's own code, or a model seen to do so."""
    dense = truth_of(trial.subject)
    if dense is None or isinstance(dense, OnRanks):
        return dense is not None
    with NarrowProbe(trial.case.dtype) as probe:
        trial.compute_anew(trial.reference.truth)
    return bool(probe.found)
