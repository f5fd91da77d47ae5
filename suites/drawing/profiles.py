"""Hypothesis profiles of the suites: how many cases every property draws in every mode. Derandomised on CI.

`draw_samples` draws outside of a property: from a seed, without a database, without shrinking.
"""

import os
from typing import TypeVar

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

PROFILES = {"quick": 8, "default": 50, "deep": 1000}
"""Profile -> cases for each property and mode; 8 have every pair of two boolean words (see `boolean_rows`). `deep` is
for one property or one mode at a time.
"""
ONE_CASE = "one-case"
"""The profile of `--case`: drawn cases are replaced, so one is enough."""
FEW = "few"
"""The profile for suites that run beside the tests of shardproof itself, which prove every default case anyway."""


def register() -> None:
    """Register all profiles, under the names that `--hypothesis-profile` takes."""
    on_ci = bool(os.environ.get("CI"))
    # `explain` would run many more failing cases, and cannot see inside ranks.
    phases = (Phase.explicit, Phase.reuse, Phase.generate, Phase.target, Phase.shrink)
    for name, cases in {**PROFILES, ONE_CASE: 1, FEW: 2}.items():
        settings.register_profile(
            name,
            max_examples=cases,
            deadline=None,
            print_blob=True,
            derandomize=on_ci,
            phases=phases,
            # A subject of one architecture refuses most of what is drawn: see `Prover.fit_case`.
            suppress_health_check=(HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much),
            **({"database": None} if on_ci else {}),
        )


T = TypeVar("T")


def draw_samples(strategy: st.SearchStrategy[T], count: int, first_seed: int) -> list[T]:
    """`count` values of the strategy, the same for the same seed; the simplest one comes first, whatever the seed."""
    found: list[T] = []

    @seed(first_seed)
    @settings(
        max_examples=max(count, 1),
        database=None,
        deadline=None,
        phases=(Phase.generate,),
        suppress_health_check=tuple(HealthCheck),
    )
    @given(strategy)
    def draw(value: T) -> None:
        found.append(value)

    if count:
        draw()
    return found
