"""The check of the witnesses: they agree with the ledger event by event, and none of them changes the outcome."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from shardproof.harness.checking.finding import Finding
from shardproof.harness.verdicts.facts import Worst, note_unchecked
from shardproof.harness.verdicts.verdict import FAIL, PASS, UNKNOWN
from shardproof.harness.witnesses.agreement import Agreement
from shardproof.harness.witnesses.session import Session

CHECK = "witnesses"


def judge_agreement(agreed: Agreement, steps: str = "") -> Finding:
    """The verdict: a failure names the first event on which the witnesses part; nothing seen at all is no agreement.

    `steps` are the chosen ones as they were requested, "" for all.
    """
    ranks = len({row.rank for row in agreed.rows})
    within = f" in steps {steps}" if steps else ""
    if not agreed.rows:
        return Finding(verdict=FAIL, message=f"no witness saw any event{within}: nothing was witnessed")
    broken = agreed.broken
    names = ", ".join(("ledger", *agreed.witnesses))
    if broken:
        others = len(broken) - 1
        more = f"; {others} more event{'s differ' if others > 1 else ' differs'}" if others else ""
        first = broken[0].recorded
        return Finding(
            verdict=FAIL,
            message=f"{broken[0]}{more}",
            worst=Worst(name=f"witnesses of {names}", error=float(len(broken)), allowed=0.0, epsilons=0.0),
            ranks=tuple(sorted({row.rank for row in broken})),
            phase=first.phase if first else "",
            region=first.region if first else "",
        )
    left = [f"{count} fields that {witness} does not tell" for witness, count in agreed.open_fields.items() if count]
    message = f"{names} agree on {len(agreed.rows)} events of {ranks} ranks{within}"
    return Finding(verdict=PASS, message=message, notes=note_unchecked(*left))


def qualify_finding(found: Finding, sessions: Mapping[str, Session], untold: str) -> Finding:
    """A finding that is no failure, with what could not be checked: a missing tool leaves it open."""
    if untold:
        message = f"{found.message}; the closed form was not asked: {untold}"
        found = replace(
            found, message=message, notes=(*found.notes, *note_unchecked("closed form of the chosen steps"))
        )
    problems = tuple(f"{tool}: {session.problem}" for tool, session in sessions.items() if session.problem)
    if not problems:
        return found
    return replace(found, verdict=UNKNOWN, message=f"{found.message}; {'; '.join(problems)}")


def check_undisturbed(found: Finding, sessions: Mapping[str, Session]) -> Finding:
    """A witness that changes a bit of the outcome is a failure, whatever it saw."""
    for tool, session in sessions.items():
        if session.disturbed:
            ranks = ",".join(map(str, session.disturbed))
            message = f"the outcome of rank {ranks} is not the same bit for bit when the recorder and {tool} watch"
            return Finding(verdict=FAIL, message=message, ranks=session.disturbed)
    return found


def explain_empty_sessions(sessions: Mapping[str, Session], notes: Sequence[str]) -> str:
    """The message of a case of which no session recorded anything: the reasons of the sessions, or the notes."""
    reasons = [session.problem for session in sessions.values()] or [
        note for note in notes if note.startswith("witness ")
    ]
    return f"nothing was witnessed: {'; '.join(reasons) or 'no session was held'}"
