"""Engines agree: the same cases give equal verdicts and equal ledgers on threads, on processes and on shapes alone.

`--hypothesis-profile deep` compares a hundred cases; `python -m suites.engines` as many as it is told.
"""

from __future__ import annotations

import pytest
from hypothesis import settings

from harness.engines.dry import DryEngine
from harness.engines.engine import Engine
from harness.engines.inproc import InprocEngine
from harness.engines.pool import PoolEngine
from suites.engines import SUBJECT, differences, drawn
from suites.profiles import PROFILES
from suites.prover import Prover

SMALL = {"layers": 1, "micro": 2, "steps": 2}


def test_every_engine_says_the_same(prover: Prover) -> None:
    quick = settings().max_examples <= PROFILES["quick"]
    worlds = tuple(world for world in prover.worlds if world <= (3 if quick else 4))
    found = drawn(6, 0, prover.subject, worlds, **SMALL) if quick else drawn(100, 0, prover.subject, worlds)
    if not found:
        pytest.skip(f"worlds {prover.worlds}: none that real processes run here; legal: --worlds 2,3")
    with InprocEngine() as inproc, PoolEngine() as pool, DryEngine() as dry:
        engines: dict[str, Engine] = {"inproc": inproc, "pool": pool}
        if prover.subject == SUBJECT:
            engines["dry"] = dry  # a third party's may look at numbers
        engines.setdefault(prover.engine.name, prover.engine)
        apart = {str(case): told for case in found if (told := differences(case, prover.subject, engines))}
    assert not apart
