"""A diagnosis in six lines: what, where, how much, first place, likely causes, how to repeat it; and when it fails.

The line `when:`, which words of the case the failure needs, comes of experiments at the end of `shardproof run`.

Errors are ratios and multiples of the machine epsilon of the run dtype.
"""

from collections.abc import Mapping, Sequence

from shardproof.harness.checking.evidence import Finding
from shardproof.harness.checking.measures.measured import ABSOLUTE, EXACT, epsilon
from shardproof.harness.checking.records import Evidence, Run
from shardproof.harness.diagnosing.diagnosis import Diagnosis, diagnose, ended
from shardproof.harness.diagnosing.failure_lines import NO_CAUSE, NO_OUTCOME, repeat_command, written
from shardproof.harness.diagnosing.first_place import First
from shardproof.harness.diagnosing.tracebacks import last_frames, whole
from shardproof.harness.errors import MachineError, ShardproofError
from shardproof.harness.protocols import CaseLike


def explain(evidence: Evidence, findings: Mapping[str, Finding], check: str, subject: str, options: str = "") -> str:
    """The six lines of a failed check."""
    return tell(diagnose(evidence, findings, check), findings[check], evidence.run, subject, options)


def tell(diagnosis: Diagnosis, finding: Finding, run: Run, subject: str, options: str = "") -> str:
    """The six lines of a diagnosis and the finding that it explains."""
    lines = {
        "what": f"{finding.message} (check {diagnosis.check})",
        "where": where(diagnosis, run.case, named=bool(finding.names)),
        "error": _how_much(run, finding, diagnosis.check),
        "first": _first(diagnosis.first) or finding.message,
        "causes": "; ".join(cause.words for cause in diagnosis.causes) or diagnosis.hint or NO_CAUSE,
        "repeat": repeat_command(run.case, subject, options),
    }
    return written(lines)


def crash(case: CaseLike, subject: str, error: ShardproofError, options: str = "") -> str:
    """The six lines of a case that ended without an outcome: the subject raised, ranks parted, the machine failed."""
    message = [line.strip() for line in str(error).strip().splitlines() if line.strip()] or ["no message"]
    frames = last_frames(whole(error))
    who = "the machine failed" if isinstance(error, MachineError) else "the subject did not finish"
    lines = {
        "what": f"{who}: {message[0]} (check run)",
        "where": f"mode={case.mode}, {case.world_size} rank{'s' if case.world_size > 1 else ''}",
        "error": NO_OUTCOME,
        "first": " | ".join([*([frames] if frames else []), *message[1:]]) or message[0],
        "causes": "; ".join(cause.words for cause in ended(error).causes),
        "repeat": repeat_command(case, subject, options),
    }
    return written(lines)


def where(diagnosis: Diagnosis, case: CaseLike, *, named: bool = False) -> str:
    """Mode, ranks, step, phase and module, as far as they are known; the tensor too when it is `named`."""
    parts = [f"mode={case.mode}", _rank_words(diagnosis.ranks, case.world_size)]
    if diagnosis.step >= 0:
        parts.append(f"step {diagnosis.step}")
    if diagnosis.phase:
        parts.append(f"phase {diagnosis.phase}")
    if diagnosis.region:
        parts.append(f"module {diagnosis.region}")
    if named:
        parts.append(f"tensor {diagnosis.name}")
    return ", ".join(parts)


def _rank_words(ranks: Sequence[int], world_size: int) -> str:
    if not ranks or len(ranks) == world_size:
        return f"all {world_size} ranks" if world_size > 1 else "the only rank"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} of {world_size}"


def _how_much(run: Run, finding: Finding, check: str) -> str:
    worst = finding.worst
    if worst is None and check in ("coverage", "parallelism", "waits"):
        return "nothing to measure: this must never be"
    if worst is None:
        return "compared exactly: nothing is allowed to differ"
    if check == "truth":
        return f"relative error {worst.error:.3g}, and rounding to float32 explains {worst.allowed:.3g}"
    if not finding.wrong and check in ("replicas", "determinism", "recording"):
        return f"compared exactly: nothing is allowed to differ; apart by {worst.error:.3g} of the largest value"
    if not finding.wrong:
        return f"{worst.error:g} event{'s' if worst.error > 1 else ''} more or less than expected on a rank, allowed 0"
    of = next(m.measure for m in finding.wrong if m.name == worst.name)
    eps = epsilon(run.dtype_of(worst.name))
    count = f"{len(finding.wrong)} tensor{'s' if len(finding.wrong) > 1 else ''} of this check wrong"
    if of == EXACT:
        return f"compared exactly: nothing is allowed to differ; {count}"
    if of == ABSOLUTE:
        return f"the truth is 0 throughout: allowed {worst.allowed:.3g}, found {worst.error:.3g}; {count}"
    error = f"{of} error {worst.error:.3g} ({worst.epsilons:.3g} eps)"
    return f"{error}, allowed {worst.allowed:.3g} ({worst.allowed / eps:.3g} eps); {count}"


def _first(first: First) -> str:
    """The place and what shows it: "backward of head in step 0: act_grad/final_norm; in the ledger: ..."."""
    shown = [first.name, *first.beside] if first.name else []
    if first.note:
        shown.append(f"{first.note} (no layout was declared)")
    if first.event:
        shown.append(f"in the ledger: {first.event}")
    prefix = f"{place(first)}: " if first.phase else ""
    return prefix + "; ".join(shown)


def place(first: First) -> str:
    """Phase, module and step: "backward of head in step 0"."""
    step = f" in step {first.step}" if first.step >= 0 else ""
    return f"{first.phase or 'unknown phase'}{f' of {first.region}' if first.region else ''}{step}"
