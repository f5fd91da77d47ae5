"""Engines agree: the same cases give equal verdicts and equal ledgers on threads, on processes and on shapes alone.

`--hypothesis-profile default` or `deep` compares a hundred cases.
"""

from typing import Any

import pytest
from hypothesis import settings

from shardproof.harness.dense_model import SUBJECT
from shardproof.harness.engines.engine import Engine
from shardproof.harness.engines.processes.forked.pool import PoolEngine
from shardproof.harness.engines.threads.dry import DryEngine
from shardproof.harness.engines.threads.inproc import InprocEngine
from shardproof.harness.protocols import CaseLike
from shardproof.harness.subject import own_cases
from shardproof.suites.drawing.profiles import PROFILES
from shardproof.suites.session.engines import differences, drawn
from shardproof.suites.session.prover import Prover

SMALL: dict[str, Any] = {"layers": 1, "micro": 2, "steps": 2}
LARGEST_WORLD = 4
"""Ranks that are processes at the same time."""


def compared(prover: Prover) -> list[CaseLike]:
    """The cases to compare, as the subject takes them; skips the test, with the reason, where there is none."""
    examples = settings().max_examples
    quick = examples <= PROFILES["quick"]
    largest = 3 if quick else LARGEST_WORLD
    if (only := prover.only) is not None:
        if only.world_size > LARGEST_WORLD:
            pytest.skip(f"case {only}: has {only.world_size} ranks, and here {LARGEST_WORLD} are processes at most")
        if reason := prover.refused(only):
            pytest.skip(reason)
        return [only]
    if (own := own_cases(prover.subject)) is not None:
        return _taken(prover, [case for case in own if case.world_size <= LARGEST_WORLD], len(own))
    worlds = tuple(world for world in prover.worlds if world <= largest)
    if not worlds:
        pytest.skip(f"worlds {prover.worlds}: none that real processes run here; legal: --worlds 2,3")
    fixed = SMALL if quick else {}
    found = drawn(min(4, examples) if quick else 100, 0, prover.subject.name, worlds, **fixed)
    near = [prover.fitting(case, **fixed) for case in found]
    taken = dict.fromkeys(case for case in near if case is not None and case.world_size <= largest)
    if not taken:
        pytest.skip(f"{prover.subject.name} takes none of {len(found)} drawn cases; the last: {prover.refusals[-1]}")
    return list(taken)


def _taken(prover: Prover, named: list[CaseLike], of: int) -> list[CaseLike]:
    """Cases that a subject names and that it takes too; skips the test where there is none."""
    taken = [case for case in named if not prover.refused(case)]
    if not taken:
        pytest.skip(f"{prover.subject.name} names {of} cases, none that it takes on at most {LARGEST_WORLD} ranks")
    return taken


def test_every_engine_says_the_same(prover: Prover) -> None:
    found = compared(prover)
    with InprocEngine() as inproc, PoolEngine() as pool, DryEngine() as dry:
        engines: dict[str, Engine] = {"inproc": inproc, "pool": pool}
        if prover.subject.name == SUBJECT:
            engines["dry"] = dry  # a third party's may look at numbers
        engines.setdefault(prover.engine.name, prover.engine)
        apart = {str(case): differing for case in found if (differing := differences(case, prover.subject, engines))}
    assert not apart
