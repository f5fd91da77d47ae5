"""Cases drawn outside of a property: by hypothesis, from a seed, without a database, without shrinking."""

from typing import TypeVar

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

T = TypeVar("T")


def sampled(strategy: st.SearchStrategy[T], count: int, first_seed: int) -> list[T]:
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
