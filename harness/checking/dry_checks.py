"""The checks that a dry run can answer: those of calls, and whether ranks of one group issue the same ones."""

from collections.abc import Mapping
from itertools import groupby
from operator import attrgetter

from shardproof.harness.checking.call_checks import groups, overlap, waits
from shardproof.harness.checking.checks import CHECKS, Check
from shardproof.harness.checking.evidence import Evidence, Finding
from shardproof.harness.checking.laws import group_events, same_sequence
from shardproof.harness.checking.ledger_checks import ledger, unlawful
from shardproof.harness.errors import ranks_text
from shardproof.harness.terms import key_of
from shardproof.harness.verdicts.facts import Note, NoteKind, unchecked
from shardproof.harness.verdicts.verdict import PASS


def order(evidence: Evidence) -> Finding:
    """Whether ranks that share a group issue the same calls in it in the same order, and which ranks are alike.

    A dry run computes no numbers: every check that it cannot answer is unchecked.
    """
    if broken := same_sequence(group_events(evidence.events), evidence.ran):
        return unlawful(broken[0])
    numbers = tuple(name for name in CHECKS if name not in DRY_CHECKS)
    notes = (Note(kind=NoteKind.NOT_ANSWERED, names=numbers, reason="the dry engine has shapes and no numbers"),)
    sequences: dict[tuple[str, ...], list[int]] = {}
    ordered = sorted(evidence.events, key=attrgetter("rank", "call_index"))
    for rank, events in groupby(ordered, key=attrgetter("rank")):
        sequences.setdefault(tuple(str(key_of(event)) for event in events), []).append(rank)
    alike = list(sequences.values()) or [list(evidence.ran)]
    classes = " | ".join(map(ranks_text, alike))
    ran = f"{len(evidence.ran)} of {evidence.case.world_size} ranks run"
    message = f"{ran}, in {len(alike)} class(es) of equal sequences: {classes}; " + "; ".join(evidence.notes[:1])
    return Finding(verdict=PASS, message=message, notes=(*notes, *unchecked(*evidence.notes[1:])))


DRY_CHECKS: Mapping[str, Check] = {
    "ledger": ledger,
    "groups": groups,
    "order": order,
    "waits": waits,
    "overlap": overlap,
}
"""Name -> check that a dry run can answer."""
