"""The check of what was returned at all: names of the truth that are missing, left out on purpose, or unknown to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from harness.checking.evidence import FAIL, PASS, UNKNOWN, Decided, Evidence, Finding
from harness.checking.measures.kinds import kind_of

ON_PURPOSE = " (left out on purpose)"
"""What stands behind an unchecked name that `subject.unchecked` declares."""
ROUTING = "routing"
"""The kind of names that need no truth: copies are compared (harness.checking.routing_checks)."""
_NAMED = 5
"""Names of a kind that a message lists; the number of the others follows."""


def coverage(evidence: Evidence) -> Finding:
    """Whether there is anything to compare, and what of the truth the subject did not return.

    Kinds of names ("grad", "logits") that it never returns are a note. Names missing inside a kind that it otherwise
    returns, and names that the truth does not know, leave the answer unknown; `subject.unchecked`, patterns of names,
    declares the missing ones that are left out on purpose.
    """
    returned = evidence.returned
    comparable = [name for name in evidence.truth if name in returned]
    missing = [name for name in evidence.truth if name not in returned]
    declared = {name for name in missing if _matched(name, evidence.declared)}
    unchecked = tuple(f"{name}{ON_PURPOSE}" if name in declared else name for name in missing)
    strange = tuple(sorted(returned - set(evidence.truth)))
    decided = _unreturned(evidence, missing)
    if evidence.torn:
        message = "nothing is compared: what the ranks drew does not make one tensor that a dense model can be given"
        return Finding(verdict=UNKNOWN, message=message, unchecked=tuple(sorted(returned)))
    if not comparable:
        got = f"it returned {', '.join(strange[:_NAMED])}" if strange else "it returned nothing"
        known = ", ".join(list(evidence.truth)[:3])
        message = f"nothing checkable: {got}; the truth has {len(evidence.truth)} names, such as {known}"
        return Finding(verdict=FAIL, message=message, unchecked=unchecked + strange, names=strange, decided=decided)
    named = {name for outcome in evidence.outcomes for name in outcome}
    strange = tuple(name for name in strange if name in named)  # a captured module of its own is nobody's slip
    if not any(kind_of(name) == ROUTING for name in evidence.truth):
        strange = tuple(
            name for name in strange if kind_of(name) != ROUTING
        )  # held against each other, without a truth
    undeclared = [name for name in missing if name not in declared]
    problems = [
        *_hidden(evidence),
        *(evidence.deviates.problems(evidence.truth) if evidence.deviates else ()),
        *_gaps(undeclared, named),
        *_unknown(strange, undeclared),
    ]
    notes = [f"{len(declared)} left out on purpose"] if declared else []
    message = f"{len(comparable)} of {len(evidence.truth)} tensors of the truth were returned"
    return Finding(
        verdict=UNKNOWN if problems else PASS,
        message="; ".join([message, *notes, *problems, *_idle(evidence)]),
        unchecked=unchecked + strange,
        decided=decided,
    )


def _unreturned(evidence: Evidence, missing: Sequence[str]) -> dict[str, Decided]:
    """By kind of which the subject returned nothing: no tensor is decided, of so many. Other checks count the rest."""
    kinds = {kind_of(name) for name in evidence.returned}
    counts = Counter(kind_of(name) for name in missing if name not in evidence.given)
    return {kind: (0, count) for kind, count in counts.items() if kind not in kinds}


def _matched(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _hidden(evidence: Evidence) -> list[str]:
    """The declaration itself, when it would leave out everything."""
    if not all(_matched(name, evidence.declared) for name in evidence.truth):
        return []
    return [
        f"unchecked={evidence.declared} declares every name of the truth, so it says nothing; legal: ('grad/*.bias',)"
    ]


def _gaps(missing: Sequence[str], named: set[str]) -> list[str]:
    """Names missing inside a kind of which the subject returned others, a sentence a kind."""
    kinds = {kind_of(name) for name in named}
    gaps = []
    for kind in dict.fromkeys(map(kind_of, missing)):
        gap = [name for name in missing if kind_of(name) == kind]
        if kind in kinds:
            gaps.append(
                f"{_listed(gap)} {'is' if len(gap) == 1 else 'are'} missing beside other {kind}/ names: return "
                f"{'it' if len(gap) == 1 else 'them'}, or declare what is left out as subject.unchecked = ({gap[0]!r},)"
            )
    return gaps


def _unknown(strange: Sequence[str], missing: Sequence[str]) -> list[str]:
    """Names that the truth does not have, with the nearest of those that are missing."""
    if not strange:
        return []
    unknown = [name + _near(name, missing) for name in strange]
    return [f"the truth does not know {_listed(unknown)}: leave out what nobody can check, or name it as it does"]


def _idle(evidence: Evidence) -> list[str]:
    """Patterns of what the subject declares and states that match no name of the truth."""
    names = list(evidence.truth)
    patterns = [("unchecked", pattern) for pattern in evidence.declared]
    patterns += [("deviates", pattern) for pattern in (evidence.deviates.sentences if evidence.deviates else ())]
    idle = [(word, pattern) for word, pattern in patterns if not any(fnmatchcase(name, pattern) for name in names)]
    return [f"{word}={pattern!r} matches no name of the truth{_near(pattern, names)}" for word, pattern in idle]


def _near(name: str, names: Sequence[str]) -> str:
    return "".join(f" ({near}?)" for near in get_close_matches(name, names, n=1, cutoff=0.5))


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}"
