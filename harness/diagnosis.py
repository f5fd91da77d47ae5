"""What a failure tells a reader, in six lines: what, where, how much, first place, likely causes, how to repeat it.

The first place is the first wrong name in the order in which training computes (`timeline`): activations forward,
logits and loss, activation gradients backward, parameter gradients backward, later steps, parameters. Errors are ratios
and multiples of the machine epsilon of the run dtype.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from torch import Tensor

from harness.evidence import FAIL, Evidence, Finding, split_axes
from harness.ledger_checks import Difference, differences, module_order
from harness.patterns import causes, partial_sums, same
from harness.places import blocks_of, place_of, timeline, wrong_ranks
from harness.protocols import CaseLike
from harness.tolerance import epsilon, kind_of

__all__ = ["case_text", "crash", "explain", "repeat_command"]

NO_CAUSE = "none of the known patterns fits"
_USUAL: Mapping[str, str] = {
    "coverage": "names that are not the canonical ones (loss/<step>, grad/<parameter>, ...), or a subject that returns "
    "nothing",
    "merge": "offsets of another rank, a padded or transposed shard, or a rank that leaves its part out",
    "parallelism": "the split was done to a tensor that is not used, or undone by what followed it",
    "waits": "the handle was dropped before its wait()",
    "determinism": "uninitialised memory, a random number without a seed, or a sum in no fixed order",
    "recording": "a program that asks whether modules or optimizers are watched, or that measures time",
}
"""What is usually behind a check that no tensor explains."""


def case_text(case: CaseLike) -> str:
    """The case's one line; never empty, so that it can stand in a table and behind `shardproof run`."""
    return str(case) or f"mode={case.mode}"


def repeat_command(case: CaseLike, subject: str, options: str = "") -> str:
    """The one command that runs this case on this subject again."""
    text = case_text(case)
    quoted = shlex.quote(text) if any(sign in text for sign in '"$`\\!') else f'"{text}"'
    return f"shardproof run {quoted} --subject {shlex.quote(subject)} {options}".rstrip()


def explain(evidence: Evidence, findings: Mapping[str, Finding], check: str, subject: str, options: str = "") -> str:
    """The six lines of a failed check."""
    finding = findings[check]
    case = evidence.case
    first_name = _first_wrong(evidence, findings)
    parted = _first_difference(evidence) if findings.get("ledger", finding).verdict == FAIL else None
    name = finding.worst.name if finding.wrong and finding.worst else next(iter(finding.names), "")
    lines = {
        "what": f"{finding.message} (check {check})",
        "where": _where(evidence, finding, name),
        "error": _how_much(evidence, finding, check),
        "first": _first(case, first_name, parted, finding),
        "causes": "; ".join(_likely(evidence, check, parted, [first_name, name])) or _USUAL.get(check, NO_CAUSE),
        "repeat": repeat_command(case, subject, options),
    }
    return _written(lines)


def crash(case: CaseLike, subject: str, message: str, options: str = "") -> str:
    """The six lines of a case whose subject raised or whose ranks parted; `message` is the engine's own."""
    said = [line.strip() for line in message.strip().splitlines() if line.strip()] or ["no message"]
    lines = {
        "what": f"the subject did not finish: {said[0]} (check run)",
        "where": f"mode={case.mode}, {case.world_size} ranks",
        "error": "nothing to compare: there is no outcome",
        "first": " | ".join(said[1:]) or said[0],
        "causes": "the subject raised, or its ranks issued different calls: the line above says where each rank stood",
        "repeat": repeat_command(case, subject, options),
    }
    return _written(lines)


def _written(lines: Mapping[str, str]) -> str:
    return "\n".join(f"{label + ':':8}{' '.join(text.split())}" for label, text in lines.items())


def _first_wrong(evidence: Evidence, findings: Mapping[str, Finding]) -> str:
    wrong = {name for finding in findings.values() if finding.verdict == FAIL for name in finding.names}
    names = [*evidence.truth, *sorted(wrong - set(evidence.truth))]
    return next((name for name in timeline(names, evidence.case.steps) if name in wrong), "")


def _first_difference(evidence: Evidence) -> Difference | None:
    if evidence.expectation is None:
        return None
    ranks = range(len(evidence.outcomes))
    parted = differences(evidence.events, evidence.expectation, ranks, module_order(evidence))
    return parted[0] if parted else None


def _where(evidence: Evidence, finding: Finding, name: str) -> str:
    place = place_of(name, evidence.case.steps) if name else None
    ranks = finding.ranks or wrong_ranks(evidence, name)
    parts = [f"mode={evidence.case.mode}", _rank_words(ranks, len(evidence.outcomes))]
    if place:
        parts.append(f"step {place.step}")
    if phase := finding.phase or (place.phase if place else ""):
        parts.append(f"phase {phase}")
    if module := finding.region or (place.module if place else ""):
        parts.append(f"module {module}")
    if name:
        parts.append(f"tensor {name}")
    return ", ".join(parts)


def _rank_words(ranks: Sequence[int], world_size: int) -> str:
    if not ranks or len(ranks) == world_size:
        return f"all {world_size} ranks" if world_size > 1 else "the only rank"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} of {world_size}"


def _how_much(evidence: Evidence, finding: Finding, check: str) -> str:
    worst = finding.worst
    if worst is None and check in ("coverage", "parallelism", "waits"):
        return "nothing to measure: this must never be"
    if worst is None:
        return "compared exactly: nothing is allowed to differ"
    if not finding.wrong:
        return f"{worst.error:g} event{'s' if worst.error > 1 else ''} more or less than expected on a rank, allowed 0"
    of = next(m.measure for m in finding.wrong if m.name == worst.name)
    eps = epsilon(evidence.case.dtype)
    count = f"{len(finding.wrong)} tensor{'s' if len(finding.wrong) > 1 else ''} of this check wrong"
    error = f"{of} error {worst.error:.3g} ({worst.epsilons:.3g} eps)"
    return f"{error}, allowed {worst.allowed:.3g} ({worst.allowed / eps:.3g} eps); {count}"


def _first(case: CaseLike, name: str, parted: Difference | None, finding: Finding) -> str:
    parts = []
    if name:
        place = place_of(name, case.steps)
        parts.append(f"{name} (step {place.step}, phase {place.phase or 'unknown'})")
    if parted:
        caller = f" at {parted.caller}" if parted.caller else ""
        parts.append(f"in the ledger: {parted}{caller}")
    return "; ".join(parts) or finding.message


def _likely(evidence: Evidence, check: str, parted: Difference | None, names: Sequence[str]) -> list[str]:
    """Causes told by the first wrong tensor, by this check's tensor, and by the ledger."""
    said: list[str] = []
    axes = split_axes(evidence.case)
    for name in dict.fromkeys(name for name in names if name in evidence.truth):
        truth = evidence.truth[name]
        if (value := evidence.merged.tensors.get(name)) is not None:
            said += causes(value, truth, axes, _neighbours(evidence, name))
        elif check == "replicas":
            said += partial_sums({rank: by[0].local for rank, by in blocks_of(evidence, name).items()}, truth, axes)
        said += _loss_of_parts(evidence, name)
    if parted:
        said.append(_blame(parted))
    return list(dict.fromkeys(said))


def _loss_of_parts(evidence: Evidence, name: str) -> list[str]:
    """Whether ranks disagree on a loss although its logits are right: then the wrong is done in between."""
    kind, _, step = name.partition("/")
    logits = evidence.merged.tensors.get(f"logits/{step}")
    if kind != "loss" or name in evidence.merged.tensors or logits is None:
        return []
    if not same(logits, evidence.truth[f"logits/{step}"]):
        return []
    return [
        "the logits are right and the loss differs between ranks: part of it (a sum, the mean of label smoothing) is "
        "taken over each rank's own part of the vocabulary"
    ]


def _neighbours(evidence: Evidence, name: str) -> dict[str, Tensor]:
    """Truths of the same kind and another step: what a stale tensor would equal."""
    kind, _, rest = name.partition("/")
    return {
        other: tensor
        for other, tensor in evidence.truth.items()
        if rest.isdigit() and other != name and kind_of(other) == kind
    }


def _blame(parted: Difference) -> str:
    """What a difference between ledger and expectation usually means."""
    line = parted.line
    if parted.kind == "missing":
        left = "each rank keeps its partial sum" if "reduce" in line.op else "ranks work on what they have alone"
        return f"the {line.op} over {line.axis} is left out: {left}"
    if parted.kind == "extra":
        return f"one {line.op} over {line.axis} too many: done twice, or not needed"
    assert parted.expected and parted.found  # the third kind has both sides
    fields = ("phase", "region", "op", "reduce_op", "axis", "group_size", "dtype", "payload_bytes")
    changed = [
        f"{field} {getattr(parted.found, field) or '-'} instead of {getattr(parted.expected, field) or '-'}"
        for field in fields
        if getattr(parted.found, field) != getattr(parted.expected, field)
    ]
    return "the call is made otherwise: " + ", ".join(changed)
