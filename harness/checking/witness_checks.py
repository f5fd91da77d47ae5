"""The check of the witnesses: they agree with the ledger event by event, and none of them changes the outcome."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from shardproof.harness.checking.finding import Finding
from shardproof.harness.verdicts.facts import Fact, Worst, note_unchecked, state_fact, state_text
from shardproof.harness.verdicts.verdict import FAIL, PASS, UNKNOWN
from shardproof.harness.witnesses.agreement import Agreement
from shardproof.harness.witnesses.session import Session

CHECK = "witnesses"


def judge_agreement(agreed: Agreement, steps: str = "") -> Finding:
    """The verdict: a failure names the first event in which the witnesses differ. It also fails if they saw nothing.

    `steps` are the chosen steps as they were requested, "" for all.
    """
    ranks = len({row.rank for row in agreed.rows})
    if not agreed.rows:
        return Finding(verdict=FAIL, facts=(state_fact("none_seen", steps=steps),))
    broken = agreed.broken
    names = ("ledger", *agreed.witnesses)
    if broken:
        more = (state_fact("more_events", count=len(broken) - 1),) if len(broken) > 1 else ()
        first = broken[0].recorded
        return Finding(
            verdict=FAIL,
            facts=(state_text(str(broken[0])), *more),
            worst=Worst(name=f"witnesses of {', '.join(names)}", error=float(len(broken)), allowed=0.0, epsilons=0.0),
            ranks=tuple(sorted({row.rank for row in broken})),
            phase=first.phase if first else "",
            region=first.region if first else "",
        )
    left = [f"{count} fields that {witness} does not tell" for witness, count in agreed.open_fields.items() if count]
    agree = state_fact("witnesses_agree", witnesses=names, events=len(agreed.rows), ranks=ranks, steps=steps)
    return Finding(verdict=PASS, facts=(agree,), notes=note_unchecked(*left))


def qualify_finding(found: Finding, sessions: Mapping[str, Session], untold: str) -> Finding:
    """A finding that is no failure, with what could not be checked. A missing tool leaves it undecided."""
    if untold:
        notes = (*found.notes, *note_unchecked("closed form of the chosen steps"))
        found = replace(found, facts=(*found.facts, state_fact("not_asked", why=untold)), notes=notes)
    problems = [
        state_fact("tool_failed", tool=tool, problem=session.problem)
        for tool, session in sessions.items()
        if session.problem
    ]
    return replace(found, verdict=UNKNOWN, facts=(*found.facts, *problems)) if problems else found


def check_undisturbed(found: Finding, sessions: Mapping[str, Session]) -> Finding:
    """The finding, but a failure if a witness changes a bit of the outcome, whatever it saw."""
    for tool, session in sessions.items():
        if session.disturbed:
            disturbed = state_fact("disturbed", ranks=session.disturbed, tool=tool)
            return Finding(verdict=FAIL, facts=(disturbed,), ranks=session.disturbed)
    return found


def explain_empty_sessions(sessions: Mapping[str, Session], notes: Sequence[str]) -> Fact:
    """Why no session recorded anything of a case: the reasons of the sessions, or the notes."""
    reasons = [session.problem for session in sessions.values()] or [
        note for note in notes if note.startswith("witness ")
    ]
    return state_fact("not_witnessed", reasons=reasons)
