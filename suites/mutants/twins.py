"""Comparisons for a planted bug: the same case without it, and the words of the case that its failure needs."""

import time
from functools import partial

from bugs.planting import Subject
from harness.checking.evidence import PASS
from harness.dense_model import SUBJECT
from harness.engines.engine import Engine
from harness.injecting.kill_matrix import NO, YES
from harness.running.experiments import Failed, words_needed
from harness.running.proof import prove
from harness.running.result import CaseResult
from harness.subject import named

WHEN_S = 10.0
"""How long the words that one failure needs are looked for."""


def quiet_without(result: CaseResult, engine: Engine, timeout_s: float) -> str:
    """Whether the case of a row passes every check without the bug, yes or no; a variant's without its word."""
    case = result.case
    right = case.but(variant="") if getattr(case, "variant", "") else case
    return YES if prove(right, SUBJECT, engine, timeout_s=timeout_s, explain=False).verdict == PASS else NO


def when_of(result: CaseResult, subject: Subject | str, engine: Engine) -> str:
    """The line `when:` of a failed case; the bug must be planted still."""
    given = named(subject)
    failed = Failed(case=result.case, verdicts=result.verdicts)
    proving = partial(prove, subject=given, engine=engine, explain=False)
    return words_needed(failed, given, proving, time.monotonic() + WHEN_S).text
