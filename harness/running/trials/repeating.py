"""The plain run of a case, in which nothing is recorded or captured: it must give the bits of the recorded run.

Another run takes time, so this one is made only when a check or a diagnosis needs it.
"""

from dataclasses import replace

from shardproof.harness.checking.evidence import Evidence
from shardproof.harness.checking.repeats import same_outcomes
from shardproof.harness.running.trials.trial import Trial


def with_repeat(trial: Trial, evidence: Evidence) -> Evidence:
    """The evidence with the outcome of a plain run, and of another one where the bits differ."""
    with trial.timed("plain"):
        plain = trial.run(trial.subject.call, name=trial.subject.address)
    if same_outcomes(evidence.outcomes, plain.outcomes):
        return replace(evidence, repeats=(evidence.outcomes,))  # rather than the same once more
    with trial.timed("again"):  # tells a subject that is not deterministic from a recording that disturbs it
        again = trial.run(trial.subject.call, name=trial.subject.address)
    return replace(evidence, repeats=(plain.outcomes, again.outcomes))
