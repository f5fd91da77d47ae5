"""Random numbers that the ranks of a failed case draw in forward and its truth does not: nothing after them can agree.

Ranks and truth run once more with every draw recorded (harness.recording.capturing.operator_probes), unless the forward
was compared and is right. Numbers that are given to the truth (masks of dropout, initial values) do not count. Our
decoder draws none; where it is the truth, ranks are watched only if they changed the random state of the process.
"""

from collections.abc import Collection
from functools import partial

from shardproof.harness.checking.measures.kinds import is_state, kind_of
from shardproof.harness.checking.records import Evidence
from shardproof.harness.errors import ShardproofError
from shardproof.harness.protocols import CaseLike, without_saving
from shardproof.harness.recording.capturing.operator_probes import DrawnNumbers, Numbers, Probed
from shardproof.harness.running.trials.trial import Trial
from shardproof.harness.running.truth.own import EXACT
from shardproof.harness.subject import NamedSubject, OnRanks
from shardproof.harness.verdicts.facts import Fact, state_fact

_LATER = frozenset({"act_grad", "grad", "grad_norm", "tokens", "param", "saved"})
"""Kinds of tensors that no forward computes."""


def with_drawn_numbers(trial: Trial, evidence: Evidence, wrong: Collection[str]) -> Evidence:
    """The evidence with the first numbers of forward that only ranks, or only the truth, drew.

    Unchanged if the forward was compared and is right, or if the runs cannot be watched.
    """
    compared = [name for name in evidence.truth.tensors if name in evidence.run.returned]
    forward = {name for name in compared if kind_of(name) not in _LATER and not is_state(name)}
    own = trial.reference.own
    untouched = not own and not getattr(trial.engine, "drew", True)
    truth, dropout = evidence.truth, evidence.run.mask_draws is None
    drawn_by_ranks = (
        truth.from_ranks and dropout
    )  # masks that were returned count as given, whatever operator drew them
    if truth.unmergeable or drawn_by_ranks or untouched or not wrong or (forward and not forward & set(wrong)):
        return evidence
    if not trial.has_time("located"):
        return evidence
    try:
        with trial.time_part("located"):
            ranks = _of_ranks(trial, trial.case, dropout)
            if not own and not any(one.forward for one in ranks):
                return evidence
            differences = _differences(ranks, _of_truth(trial, dropout))
            for other in evidence.regroupings.runs if evidence.regroupings else ():
                case = trial.case.but(**other.sizes, **without_saving(trial.case))
                differences = differences or _differences(ranks, _of_ranks(trial, case, dropout), other.words)
            return evidence.with_found(drawn=differences)
    except ShardproofError:  # the probe's dispatch mode may break a program, which shows nothing about it
        return evidence


def _of_ranks(trial: Trial, case: CaseLike, dropout: bool, subject: NamedSubject | None = None) -> list[Numbers]:
    run = trial.run(Probed(subject or trial.subject, partial(DrawnNumbers, dropout=dropout)), case)
    return [Numbers.read(name) for name in dict.fromkeys(name for outcome in run.outcomes for name in outcome)]


def _of_truth(trial: Trial, dropout: bool) -> list[Numbers]:
    own = trial.reference.own
    if own and isinstance(own.dense, OnRanks):
        return _of_ranks(trial, own.dense.case_of(trial.case).but(dtype=EXACT), dropout, own.dense.subject)
    probe = DrawnNumbers(dropout=dropout)
    with probe:
        trial.compute_anew(trial.reference.truth)
    return probe.found


def _differences(ranks: list[Numbers], others: list[Numbers], beside: str = "") -> Fact | None:
    """The first draw that only the ranks made, or only the others: the truth, or the ranks of the grouping `beside`."""
    known = [{one.bits for one in drawn} for drawn in (ranks, others)]
    mine = [one for one in ranks if one.forward and one.bits not in known[1]]
    lacking = [one for one in others if one.forward and one.bits not in known[0]]
    places = {one.place for one in ranks}
    by_ranks = mine or [one for one in lacking if one.place in places]
    first = next(iter(by_ranks or lacking), None)
    return None if first is None else state_fact("draws", draw=str(first), beside=beside, by_ranks=bool(by_ranks))
