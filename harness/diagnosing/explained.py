"""A failed check as the stored record: place, error, likely causes, and the command that repeats it."""

import shlex

from shardproof.harness.checking.finding import Finding
from shardproof.harness.checking.measures.measured import epsilon
from shardproof.harness.checking.records import RecordedRun
from shardproof.harness.diagnosing.diagnosis import Diagnosis, diagnose_ended_case
from shardproof.harness.diagnosing.tracebacks import last_frames, whole_traceback
from shardproof.harness.errors import MachineError, ShardproofError
from shardproof.harness.protocols import CaseLike, case_text
from shardproof.harness.verdicts.facts import End, FailedCheck, LikelyCause, Where, WrongTensor

LAUNCHED = "torchrun --nproc-per-node {} -m shardproof"
"""The words that replace `shardproof` if every rank is launched."""


def repeat_command(case: CaseLike, subject: str, options: str = "") -> str:
    """The one command that runs this case on this subject again."""
    text = case_text(case)
    quoted = shlex.quote(text) if any(sign in text for sign in '"$`\\!') else f'"{text}"'
    program = LAUNCHED.format(case.world_size) if "--engine torchrun" in options else "shardproof"
    return f"{program} run {quoted} --subject {shlex.quote(subject)} {options}".rstrip()


def place_of_failure(diagnosis: Diagnosis, case: CaseLike, *, named: bool = False) -> Where:
    """Where a check failed; the tensor too when it is `named`."""
    return Where(
        mode=case.mode,
        world_size=case.world_size,
        ranks=tuple(diagnosis.ranks),
        step=diagnosis.step,
        phase=diagnosis.phase,
        region=diagnosis.region,
        tensor=diagnosis.name if named else "",
    )


def likely_causes(diagnosis: Diagnosis) -> tuple[LikelyCause, ...]:
    """The causes of a diagnosis, without the numbers that prove them."""
    return tuple(LikelyCause(id=cause.id, fact=cause.fact) for cause in diagnosis.causes)


def failed_check(
    diagnosis: Diagnosis, finding: Finding, run: RecordedRun, subject: str, options: str = ""
) -> FailedCheck:
    """The record of a diagnosis and the finding that it explains."""
    worst = finding.worst
    return FailedCheck(
        where=place_of_failure(diagnosis, run.case, named=bool(finding.names)),
        repeat=repeat_command(run.case, subject, options),
        wrong=tuple(
            WrongTensor(name=m.name, measure=m.measure, error=m.error, allowed=m.allowed) for m in finding.wrong
        ),
        unit=epsilon(run.dtype_of(worst.name)) if worst and finding.wrong else 0.0,
        first=diagnosis.first,
        causes=likely_causes(diagnosis),
        agreement=diagnosis.agreement,
    )


def failed_run(case: CaseLike, subject: str, error: ShardproofError, options: str = "") -> FailedCheck:
    """The record of a case without an outcome: the subject raised, ranks diverged, the machine failed."""
    diagnosis = diagnose_ended_case(error)
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()] or ["no message"]
    return FailedCheck(
        where=place_of_failure(diagnosis, case),
        repeat=repeat_command(case, subject, options),
        causes=likely_causes(diagnosis),
        end=End(
            machine=isinstance(error, MachineError), lines=tuple(lines), frames=last_frames(whole_traceback(error))
        ),
    )
