"""What cannot be judged: differences between two runs of one launch, random numbers, and what only rounding may
explain.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from shardproof.harness.checking.finding import Finding
from shardproof.harness.checking.measures.kinds import kind_of
from shardproof.harness.checking.measures.spreads import run_spreads
from shardproof.harness.outcome.blocks import localize
from shardproof.harness.parity import samples
from shardproof.harness.parity.comparison import NUMERIC, LaunchComparison, judge_numbers, wrong_starts
from shardproof.harness.parity.quantities import control_tensors
from shardproof.harness.parity.recorded import Launch
from shardproof.harness.verdicts.facts import Fact, notes_about, state_fact
from shardproof.harness.verdicts.verdict import FAIL, PASS, UNKNOWN


def spreads_of(seen: LaunchComparison, again: Launch) -> dict[str, float]:
    """Name -> how far two runs of the first launch differ, for the tensors that do."""
    second = {
        name: tensor for name, tensor in control_tensors(again, seen.flat, seen.reading).items() if name in seen.tensors
    }
    absent = {name: torch.zeros(0) for name in seen.tensors if name not in second}
    return run_spreads([localize(seen.tensors)], [localize({**second, **absent})])


def check_determinism(seen: LaunchComparison, again: Launch) -> Finding:
    """Whether the first launch repeats itself. What differs by more than rounding cannot be judged."""
    spreads = spreads_of(seen, again)
    limit = torch.finfo(getattr(torch, seen.case.dtype)).eps ** 0.5
    wide = [name for name, spread in spreads.items() if spread > limit]
    others = (samples.describe_difference(samples.samples_of(seen.first, again, one.step)) for one in seen.steps)
    if how := next(filter(None, others), None):
        return Finding(verdict=UNKNOWN, facts=(state_fact("launch_samples", how=how),))
    if wide:
        fact = state_fact("launch_differs", names=wide)
        return Finding(verdict=UNKNOWN, facts=(fact,), notes=notes_about(undecided=tuple(wide)))
    return Finding(verdict=PASS, facts=(state_fact("launch_repeats", tensors=len(spreads)),))


def undecided_by_chance(seen: LaunchComparison, findings: dict[str, Finding]) -> dict[str, Finding]:
    """The findings, unknown instead of failed, since the first launch does not repeat itself."""
    repeated = findings.get("determinism")
    if repeated is None or repeated.verdict == PASS:
        return findings
    return _as_unknown(findings, (samples.CHECK, "replicas", *NUMERIC), state_fact("runs_apart"))


def undecided_by_starts(seen: LaunchComparison, findings: dict[str, Finding]) -> dict[str, Finding]:
    """The findings, unknown instead of failed, since some parameters did not get the requested initial weights."""
    lacking = {name: why for rank in seen.second.ranks for name, why in dict(rank.about.get("same_init") or {}).items()}
    if lacking and wrong_starts(seen, findings):
        name, why = next(iter(lacking.items()))
    elif (other := _given_by_number(seen)) is not None:
        name, why = other[0], state_fact("own_number", name=other[1]).text
    else:
        return findings
    return _as_unknown(findings, ("replicas", *NUMERIC), state_fact("no_same_init", name=name, why=str(why)))


def _given_by_number(seen: LaunchComparison) -> tuple[str, str] | None:
    """A parameter that got the initial value of another layer, since its stage numbers layers from 0; and its name in
    the first launch.
    """
    given = {rank.rank for rank in seen.second.ranks if dict(rank.about.get("options") or {}).get("same_init")}
    placed = seen.partners.placements
    for (rank, name), wanted in seen.partners.staged.items():
        if rank in given and name != wanted and (rank, name) in placed and placed[rank, name].names == (name,):
            return name, wanted
    return None


def undecided_by_samples(seen: LaunchComparison, findings: dict[str, Finding]) -> dict[str, Finding]:
    """The findings; losses on which ranks disagree are unknown if nothing shows whether these read the same samples."""
    torn = findings.get("replicas")
    if findings[samples.CHECK].verdict != UNKNOWN or torn is None or {*map(kind_of, torn.names)} != {"loss"}:
        return findings
    return _as_unknown(findings, ("replicas",), state_fact("unknown_samples"))


def undecided_by_draws(seen: LaunchComparison, findings: dict[str, Finding]) -> dict[str, Finding]:
    """The findings of numbers, unknown instead of failed, since launch A's forward draws random numbers (dropout).

    If launch A draws none, its numbers are certain, and draws of launch B are a difference between the two.
    """
    drawn = [str(one) for rank in seen.first.ranks for one in rank.about.get("drawn", ())]
    if not drawn:
        return findings
    why = state_fact("numbers_drawn", names=list(dict.fromkeys(drawn)))
    return _as_unknown(findings, ("replicas", *NUMERIC[1:]), why)


def undecided_without_controls(seen: LaunchComparison, findings: dict[str, Finding]) -> dict[str, Finding]:
    """The findings of numbers, unknown instead of failed: rounding may explain them, and no run shows how far it goes.

    Half of the digits of a dtype is more than rounding takes in a few steps, unless training is chaotic. But Adam makes
    a whole step of it where a gradient is near zero.
    """
    if seen.controls or seen.case.dtype == "float64":
        return findings
    limit = torch.finfo(getattr(torch, seen.case.dtype)).eps ** 0.5
    _, bounded = judge_numbers(seen, assumed=limit)
    beyond = {one.name for finding in bounded.values() for one in finding.wrong if one.error > limit}

    def may_be_rounding(finding: Finding) -> bool:
        return bool(finding.wrong) and not any(one.name in beyond for one in finding.wrong)

    small = [check for check, finding in findings.items() if may_be_rounding(finding)]
    return _as_unknown(findings, small, state_fact("rounding_unknown"))


def _as_unknown(findings: dict[str, Finding], checks: Sequence[str], why: Fact) -> dict[str, Finding]:
    """The findings; those of these checks are unknown if they failed."""
    return {
        check: replace(finding, verdict=UNKNOWN, facts=(*finding.facts, state_fact("proves_nothing", why=why)))
        if check in checks and finding.verdict == FAIL
        else finding
        for check, finding in findings.items()
    }
