"""The runs of one case, from which its evidence is made: the dense model, the subject recorded, the subject unwatched.

Watching (capturing activations) costs another run, so it is done only when a check or a diagnosis needs it. The
harness imports no model: the reference is named like any subject. Times are seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from harness.checking.evidence import Evidence, gathered
from harness.checking.exact_checks import same_outcomes
from harness.checking.measures.tolerance import is_state, kind_of
from harness.engines.engine import Engine
from harness.errors import RequestError, error_text
from harness.outcome.merging import Merged, Outcomes, held_once
from harness.protocols import Axes, CaseLike, FactsLike, TermLike, case_text
from harness.recording.capturing.dropout_masks import WithMasks
from harness.resolve import resolve
from harness.running.ranks.execution import execute, execute_captured
from harness.running.truth.joint_masks import masks_of
from harness.running.truth.kept import Truths
from harness.running.truth.own_truth import OwnTruth, draws_of
from harness.running.truth.reference import REFERENCE, Function, Reference
from harness.subject import NamedSubject, Unanswered, deviations, left_out, orders, refusal, stated

__all__ = [
    "Asked",
    "Trial",
    "elsewhere",
    "expectation_of",
    "explained",
    "orders_of",
    "recorded",
    "watched",
]

T = TypeVar("T")
GIVEN = "mask", "init"
"""The kinds of names that a truth of the subject's own may take as given."""
Asked = tuple[Function, tuple[tuple[str, int], ...]]
"""A function of the reference and the words that it was given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One case on one subject, and how it is run. `seconds` and `problems` fill up as its runs end.

    `problems`: what the subject could not answer (expectation, activations) -> why.
    `given` fills up with what of the subject's outcome its truth must be given (see Reference.given).
    `known` and `facts` fill up with what the reference computed; trials of one case may share them, and trials of cases
    that are alike to the dense model its `truths`.
    """

    case: CaseLike
    subject: NamedSubject
    engine: Engine
    reference: Reference = REFERENCE
    device: str = "cpu"
    timeout_s: float = 60.0
    seconds: dict[str, float] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    known: dict[Asked, Mapping[str, Tensor]] = field(default_factory=dict)
    facts: dict[str, FactsLike] = field(default_factory=dict)
    truths: Truths = field(default_factory=Truths)
    given: dict[str, Tensor] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The case's text."""
        return case_text(self.case)

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Note how long the body takes, also when it raises."""
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - start_s

    def dense(self, name: Function, *, part: str = "truth", **words: int) -> Mapping[str, Tensor]:
        """What a function of the reference computes, on the CPU, once for trials that share `known`; nothing of ""."""
        if not name:
            return {}
        asked = name, tuple(words.items())
        if asked not in self.known:
            self.known[asked] = self.computed(name, part=part, **words)
        return self.known[asked]

    def true(self, name: Function) -> Mapping[str, Tensor]:
        """What a function of the reference computes of the case that stands for all alike to the dense model."""
        if not name:
            return {}
        if (name, ()) not in self.known:
            alike: Any = resolve(self.reference.alike) if self.reference.alike else lambda case: case
            case: CaseLike = alike(self.case)
            self.known[name, ()] = self.truths.of(case, name, lambda: self.computed(name, case))
        return self.known[name, ()]

    def computed(
        self, name: Function, case: CaseLike | None = None, /, *, part: str = "truth", **words: Any
    ) -> Mapping[str, Tensor]:
        """The same, computed anew and timed as this part. Raises RequestError when the reference cannot compute it."""
        function: Any = resolve(name) if isinstance(name, str) else name
        if self.given:
            words["given"] = self.given
        try:
            with self.timed(part):
                outcome: Mapping[str, Tensor] = function(case or self.case, torch.device(self.device), **words)
        except (ValueError, OSError) as problem:
            raise RequestError(f"case {self.text!r}: the dense model cannot compute it: {problem}") from problem
        return {key: tensor.detach().cpu() for key, tensor in outcome.items()}


def recorded(trial: Trial) -> Evidence:
    """The evidence of one recorded run beside the dense model, without control runs; nothing is captured or repeated.

    Raises RequestError when the dense model cannot be computed, and what the engine raises.
    """
    case, names = trial.case, trial.reference
    kinds: tuple[str, ...] = cast(Any, resolve(names.given))(case) if names.given else ()
    kinds = GIVEN if isinstance(names.truth, OwnTruth) and names.truth.takes_given else kinds
    truth, torn = ({} if kinds else trial.true(names.truth)), False
    draws = draws_of(names.truth, trial.text)
    with trial.timed("recorded"):
        call, name = (WithMasks(trial.subject), "") if draws else (trial.subject.call, trial.subject.address)
        run = execute(
            case, call, trial.engine, text=trial.text, device=trial.device, timeout_s=trial.timeout_s, name=name
        )
    ranks = masks_of(case, {**case.axes, **orders_of(trial)}, draws, run.outcomes)
    if ranks.problem:
        trial.problems["masks"], truth, torn = ranks.problem, {}, True
    elif kinds or draws:
        merged = gathered(ranks.outcomes, ranks.masks, {} if draws else truth)
        truth, torn = _given(trial, kinds or GIVEN, merged)
    merged = gathered(ranks.outcomes, ranks.masks, truth)
    outcomes = held_once(ranks.outcomes, merged)
    if not any(is_state(name) for outcome in outcomes for name in outcome):
        truth = {name: tensor for name, tensor in truth.items() if not is_state(name)}
    return Evidence(
        case=case,
        outcomes=outcomes,
        captured=ranks.masks,
        merged=merged,
        truth=truth,
        controls=(),
        events=run.events,
        expectation=expectation_of(trial),
        repeats=(),
        unwaited=run.unwaited,
        spans=run.spans,
        orders=orders_of(trial),
        facts=_facts(trial),
        declared=_asked(trial, "coverage", lambda: left_out(trial.subject), ()),
        given=tuple(trial.given),
        deviations=_deviations(trial, merged),
        mask_draws=ranks.draws,
        torn=torn,
    )


def _deviations(trial: Trial, merged: Merged) -> Mapping[str, float]:
    """What the subject, or else the reference, states of initial values, where the subject returned any."""
    if not any(kind_of(name) == "init" for name in merged.tensors):
        return {}
    none: Mapping[str, float] = {}
    own = _asked(trial, "initial_values", lambda: deviations(trial.case, trial.subject.call), none)
    stated: Any = resolve(trial.reference.deviations) if trial.reference.deviations else lambda case: {}
    return own or cast(Mapping[str, float], stated(trial.case))


def _given(trial: Trial, kinds: Sequence[str], merged: Merged) -> tuple[Mapping[str, Tensor], bool]:
    """The truth of what the subject drew, and whether there is none: where its replicas or shards of that do not make
    one tensor, no dense model can be given it, and the truth is just what did merge.
    """
    trial.given.update({name: tensor for name, tensor in merged.tensors.items() if kind_of(name) in kinds})
    trial.known.clear()  # trials of other subjects drew other numbers
    if any(kind_of(flaw.name) in kinds for flaw in merged.flaws):
        return dict(trial.given), True
    return {**trial.dense(trial.reference.truth), **trial.given}, False


def watched(trial: Trial, evidence: Evidence) -> Evidence:
    """The same evidence with an unrecorded run beside it: activations captured, outcomes to compare bit for bit."""
    case = trial.case
    with trial.timed("plain"):
        plain = execute_captured(
            case,
            trial.subject.call,
            trial.engine,
            device=trial.device,
            timeout_s=trial.timeout_s,
            name=trial.subject.address,
            overlap=any(getattr(term, "hidden", False) for term in evidence.expectation or ()),
        )
    if plain.problem:
        trial.problems["activations"] = plain.problem
    repeats = [evidence.outcomes]  # rather than the same once more
    if not same_outcomes(evidence.outcomes, plain.outcomes):
        repeats = [plain.outcomes]
        with trial.timed("again"):  # tells a subject that is not deterministic from a recording that disturbs it
            again = execute(
                case,
                trial.subject.call,
                trial.engine,
                text=trial.text,
                record=False,
                device=trial.device,
                timeout_s=trial.timeout_s,
                name=trial.subject.address,
            )
        repeats.append(again.outcomes)
    captured: Outcomes = plain.captured
    if isinstance(trial.reference.truth, OwnTruth):  # it knows no modules, unless it returns their tensors by name
        captured = tuple({name: found[name] for name in found if name in evidence.truth} for found in captured)
    if evidence.captured:  # masks
        captured = tuple({**a, **b} for a, b in zip(captured or evidence.captured, evidence.captured, strict=True))
    merged = gathered(evidence.outcomes, captured, evidence.truth, evidence.merged.tensors)
    return replace(
        evidence,
        captured=held_once(captured, merged),
        merged=merged,
        repeats=tuple(repeats),
        saved_bytes=plain.saved_bytes,
        hidden=plain.hidden,
    )


def explained(trial: Trial, evidence: Evidence, wrong: Collection[str]) -> Evidence:
    """The same evidence with what explains these wrong names: gradients taken apart, data read otherwise."""
    kinds = {kind_of(name) for name in wrong}
    shares: Mapping[str, Tensor] = {}
    what_if: dict[str, Tensor] = {}
    try:
        if kinds & {"grad", "param", "param_after", "exp_avg_after", "grad_norm", "tokens", "act", "loss"}:
            shares = trial.dense(trial.reference.shares, part="explained")
        if kinds & {"act", "logits", "loss", "grad"}:
            what_if |= trial.dense(trial.reference.alternatives, part="explained")
        if "act" in kinds:
            what_if |= trial.dense(trial.reference.rules, part="explained")
        for kind, function in (("metric", trial.reference.metrics), ("param", trial.reference.trainings)):
            what_if |= trial.dense(function, part="explained") if kind in kinds else {}
    except Exception as problem:  # the failure stands; less of it is explained, and that is said
        trial.problems["explanation"] = f"the dense model raised while a cause was looked for: {error_text(problem)}"
    return replace(evidence, shares=shares, alternatives=what_if)


def elsewhere(trial: Trial, case: CaseLike, first: str) -> Evidence | None:
    """Evidence of the same subject in another case, as far as this tensor needs it; None when there is none."""
    other = replace(trial, case=case, seconds={}, problems={}, known={}, facts={}, given={})
    try:
        if refusal(case, trial.subject):
            return None
        with trial.timed("elsewhere"):
            seen = recorded(other)
            if kind_of(first) in ("act", "act_grad"):
                seen = watched(other, seen)
            return replace(seen, shares=other.dense(trial.reference.shares))
    except Exception:  # then this case decides nothing
        return None


def _facts(trial: Trial) -> FactsLike | None:
    """What the reference states about the case's data; one that raises is noted as a problem."""
    name = trial.reference.anchors
    if name and name not in trial.facts:
        state: Any = resolve(name)
        try:
            with trial.timed("truth"):
                trial.facts[name] = state(trial.case)
        except Exception as problem:
            trial.problems["data"] = f"the reference could not state what must hold of the data: {error_text(problem)}"
    return trial.facts.get(name)


def expectation_of(trial: Trial) -> tuple[TermLike, ...] | None:
    """The subject's closed form, None when it states none; a closed form that raises is noted as a problem."""
    return _asked(trial, "expectation", lambda: stated(trial.case, trial.subject.call), None)


def orders_of(trial: Trial) -> Axes:
    """The subject's own rank orders, none when it states none; rank lists that are none are noted as a problem."""
    return _asked(trial, "groups", lambda: orders(trial.case, trial.subject.call), {})


def _asked(trial: Trial, check: str, ask: Callable[[], T], without: T) -> T:
    """What the subject states of itself; `without`, and a problem of this check, when its own code fails."""
    try:
        return ask()
    except Unanswered as problem:  # no verdict on the run, and it must not read as if nothing were stated
        trial.problems[check] = str(problem)
        return without
