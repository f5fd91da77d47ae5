"""The unrecorded run of a case: activations are captured, and its outcomes are compared with those of the recorded run.

Another run takes time, so this one is made only when a check or a diagnosis needs it.
"""

from dataclasses import replace

from harness.checking.evidence import Evidence, merged_outcomes
from harness.checking.repeats import same_outcomes
from harness.outcome.merging import Outcomes, held_once
from harness.running.trials.trial import Trial
from harness.torch_internals.memory import give_back


def with_unrecorded_run(trial: Trial, evidence: Evidence) -> Evidence:
    """Evidence with an unrecorded run beside it: activations captured, outcomes to compare bit for bit."""
    overlap = any(getattr(term, "hidden", False) for term in evidence.expectation or ())
    with trial.timed("plain"):
        plain = trial.run(trial.subject.call, watch=True, overlap=overlap, name=trial.subject.address)
    if plain.problem:
        trial.problems["activations"] = plain.problem
    repeats = [evidence.outcomes]  # rather than the same once more
    if not same_outcomes(evidence.outcomes, plain.outcomes):
        repeats = [plain.outcomes]
        with trial.timed("again"):  # tells a subject that is not deterministic from a recording that disturbs it
            again = trial.run(trial.subject.call, name=trial.subject.address)
        repeats.append(again.outcomes)
    captured: Outcomes = plain.captured
    if trial.reference.own:  # it knows no modules, unless it returns their tensors by name
        captured = tuple({name: rank[name] for name in rank if name in evidence.truth} for rank in captured)
    if evidence.captured:  # masks
        captured = tuple({**a, **b} for a, b in zip(captured or evidence.captured, evidence.captured, strict=True))
    merged = merged_outcomes(evidence.outcomes, captured, evidence.truth, evidence.merged.tensors)
    with_both = replace(
        evidence,
        captured=held_once(captured, merged),
        merged=merged,
        repeats=tuple(repeats),
        saved_bytes=plain.saved_bytes,
        hidden=plain.hidden,
    )
    del plain, captured
    give_back(merged.tensors.values())
    return with_both
