"""`shardproof help calls CASE`: the calls that a subject states for a case."""

import sys

from shardproof.harness.errors import RequestError
from shardproof.harness.subject import case_of, refusal, resolve_subject
from shardproof.harness.subject.call import answer_question
from shardproof.reports.printing.run_tables import calls_table
from shardproof.reports.printing.text import show_table


def show_calls(text_of_case: str, name: str) -> None:
    """Print what the subject of this name states. Raises RequestError if it states nothing or refuses the case."""
    subject = resolve_subject(name)
    case = case_of(text_of_case, subject)
    expected = getattr(subject.call, "expected", None)
    if reason := refusal(case, subject):
        raise RequestError(f"case {str(case)!r}: {reason}")
    terms = None if expected is None else answer_question("expected", lambda: expected(case))
    if terms is None:
        raise RequestError(f"subject={name}: states no calls for {case}; legal: a subject with `expected(case)`")
    show_table(calls_table(str(case), terms), sys.stdout)
