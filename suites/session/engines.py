"""The same cases on every engine: equal verdicts, equal ledgers, equal expectations; what differs is a bug.

Cases are drawn once, by the driver, in equal shares for all modes. Every engine is held against the first. Of a ledger
all columns are compared but the times and the caller. The dry engine has no numbers and runs the ranks that stand for
all. Its verdicts, the events of those ranks, and the expectation are compared.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardproof.harness.dense_model import SUBJECT
from shardproof.harness.engines.engine import Engine
from shardproof.harness.errors import ShardproofError
from shardproof.harness.ledger import REPEATABLE, Event
from shardproof.harness.protocols import CaseLike
from shardproof.harness.running.proof import prove
from shardproof.harness.running.result import CaseResult
from shardproof.harness.subject import NamedSubject
from shardproof.reference.case import Case
from shardproof.suites.drawing.profiles import draw_samples
from shardproof.suites.drawing.strategies import cases
from shardproof.suites.session.request import chosen_modes

WORLDS = (2, 3, 4)
"""World sizes to draw from: real processes share the machine's cores."""


def drawn(
    count: int, first_seed: int = 0, subject: str = SUBJECT, worlds: Sequence[int] = WORLDS, **fixed: Any
) -> list[Case]:
    """`count` cases, the same for the same seed, in equal shares for all modes of the subject; with these words."""
    modes = chosen_modes(subject, "all")
    found: list[Case] = []
    for place, mode in enumerate(modes):
        share = count // len(modes) + (place < count % len(modes))
        # hypothesis begins with the simplest of all, which is left out
        drawn_of_mode = draw_samples(cases(mode, worlds, **fixed), share + 1 if share else 0, 1000 * first_seed + place)
        found += drawn_of_mode[1 : share + 1]
    return found


def differences(case: CaseLike, subject: str | NamedSubject, engines: Mapping[str, Engine]) -> list[str]:
    """Differences of the engines from the first in this case; a case that an engine cannot run is a difference."""
    results: dict[str, CaseResult] = {}
    differing: list[str] = []
    for name, engine in engines.items():
        try:
            results[name] = prove(case, subject, engine)
        except ShardproofError as error:
            differing.append(f"{name}: {error}")
    first, *others = results.items()
    for name, result in others:
        differing += [f"{name} against {first[0]}: {words}" for words in unlike(first[1], result, dry=name == "dry")]
    return differing


def unlike(one: CaseResult, other: CaseResult, *, dry: bool = False) -> Iterator[str]:
    """In which words two results of a case differ. `dry`: the other has some of the checks and ranks only."""
    verdicts, theirs = _verdicts(one), _verdicts(other)
    if dry:
        verdicts = {check: verdict for check, verdict in verdicts.items() if check in theirs}
        theirs = {check: verdict for check, verdict in theirs.items() if check in verdicts}
    for check in sorted(verdicts.keys() | theirs.keys()):
        if verdicts.get(check) != theirs.get(check):
            yield f"{check} is {theirs.get(check)}, not {verdicts.get(check)}"
    if not one.events or (dry and not theirs):
        yield "nothing was recorded or checked"
    ran = {event.rank for event in other.events} if dry else None
    mine, their = _rows(one.events, ran), _rows(other.events)
    if len(mine) != len(their):
        yield f"the ledger has {len(their)} events, not {len(mine)}"
    for row, their_row in zip(mine, their, strict=False):
        if row != their_row:
            parted = {name: (b, a) for name, a, b in zip(REPEATABLE, row, their_row, strict=True) if a != b}
            at = dict(zip(REPEATABLE, row, strict=True))
            yield f"the event {at['call_index']} of rank {at['rank']} differs: {parted}"
            break
    if list(one.expectation or ()) != list(other.expectation or ()):
        yield "the expectation differs"


def _verdicts(result: CaseResult) -> dict[str, str]:
    return {verdict.check: verdict.verdict for verdict in result.verdicts}


def _rows(events: Sequence[Event], ranks: set[int] | None = None) -> list[tuple[object, ...]]:
    """The compared columns, by rank and call."""
    ordered = sorted(events, key=lambda event: (event.rank, event.call_index))
    return [
        tuple(getattr(event, column) for column in REPEATABLE)
        for event in ordered
        if ranks is None or event.rank in ranks
    ]
