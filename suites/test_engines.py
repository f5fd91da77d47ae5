"""Engines agree: the same cases give equal verdicts and equal ledgers on threads, on processes and on shapes alone.

Cases are drawn once, by the driver, in equal shares for all modes. Every engine is compared with the first, and any
difference is a bug. Of a ledger all columns are compared but times and caller. The dry engine has no numbers and runs
only ranks that stand for all others. Its verdicts, the events of those ranks, and the expectation are compared.
`--hypothesis-profile default` or `deep` compares a hundred cases.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import settings

from shardproof.harness.dense_model import SUBJECT
from shardproof.harness.engines.engine import Engine
from shardproof.harness.engines.processes.forked.pool import PoolEngine
from shardproof.harness.engines.threads.dry import DryEngine
from shardproof.harness.engines.threads.inproc import InprocEngine
from shardproof.harness.errors import ShardproofError
from shardproof.harness.ledger import REPEATABLE, Event
from shardproof.harness.protocols import CaseLike
from shardproof.harness.running.proof import prove
from shardproof.harness.running.result import CaseResult
from shardproof.harness.subject import NamedSubject, own_cases
from shardproof.reference.case import Case
from shardproof.suites.drawing.profiles import PROFILES, draw_samples
from shardproof.suites.drawing.strategies import cases
from shardproof.suites.session.prover import Prover
from shardproof.suites.session.request import chosen_modes

WORLDS = (2, 3, 4)
"""World sizes to draw from: real processes share the machine's cores."""


def draw_cases(
    count: int, first_seed: int = 0, subject: str = SUBJECT, worlds: Sequence[int] = WORLDS, **fixed: Any
) -> list[Case]:
    """`count` cases with these `fixed` words, the same for the same seed, in equal shares for the subject's modes."""
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
        differing += [
            f"{name} against {first[0]}: {words}" for words in describe_differences(first[1], result, dry=name == "dry")
        ]
    return differing


def describe_differences(one: CaseResult, other: CaseResult, *, dry: bool = False) -> Iterator[str]:
    """How two results of a case differ, in words. `dry`: the other one has only some of the checks and ranks."""
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


SMALL: dict[str, Any] = {"layers": 1, "micro": 2, "steps": 2}
LARGEST_WORLD = 4
"""The most ranks that are processes at the same time."""


def cases_to_compare(prover: Prover) -> list[CaseLike]:
    """The cases to compare, as the subject takes them; skips the test, with the reason, where there is none."""
    examples = settings().max_examples
    quick = examples <= PROFILES["quick"]
    largest = 3 if quick else LARGEST_WORLD
    if (only := prover.only) is not None:
        if only.world_size > LARGEST_WORLD:
            pytest.skip(f"case {only}: has {only.world_size} ranks, and here {LARGEST_WORLD} are processes at most")
        if reason := prover.reason_of_refusal(only):
            pytest.skip(reason)
        return [only]
    if (own := own_cases(prover.subject)) is not None:
        return _taken_cases(prover, [case for case in own if case.world_size <= LARGEST_WORLD], len(own))
    worlds = tuple(world for world in prover.worlds if world <= largest)
    if not worlds:
        pytest.skip(f"worlds {prover.worlds}: none that real processes run here; legal: --worlds 2,3")
    fixed = SMALL if quick else {}
    found = draw_cases(min(4, examples) if quick else 100, 0, prover.subject.name, worlds, **fixed)
    near = [prover.fit_case(case, **fixed) for case in found]
    taken = dict.fromkeys(case for case in near if case is not None and case.world_size <= largest)
    if not taken:
        pytest.skip(f"{prover.subject.name} takes none of {len(found)} drawn cases; the last: {prover.refusals[-1]}")
    return list(taken)


def _taken_cases(prover: Prover, named: list[CaseLike], of: int) -> list[CaseLike]:
    """Cases that a subject names and that it takes too; skips the test where there is none."""
    taken = [case for case in named if not prover.reason_of_refusal(case)]
    if not taken:
        pytest.skip(f"{prover.subject.name} names {of} cases, none that it takes on at most {LARGEST_WORLD} ranks")
    return taken


def test_every_engine_says_the_same(prover: Prover) -> None:
    found = cases_to_compare(prover)
    with InprocEngine() as inproc, PoolEngine() as pool, DryEngine() as dry:
        engines: dict[str, Engine] = {"inproc": inproc, "pool": pool}
        if prover.subject.name == SUBJECT:
            engines["dry"] = dry  # a third party's may look at numbers
        engines.setdefault(prover.engine.name, prover.engine)
        apart = {str(case): differing for case in found if (differing := differences(case, prover.subject, engines))}
    assert not apart
