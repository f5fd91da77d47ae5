"""A trial of what a feature needs of torch, and what holds where it does not work."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A feature that needs torch: `works()` tries it; `otherwise` is what holds where it does not work."""

    feature: str
    names: str
    otherwise: str
    works: Callable[[], bool]


def probe(feature: str, *, names: str, otherwise: str) -> Callable[[Callable[[], bool]], Probe]:
    """A decorator: the function is the trial of a probe, which takes its place."""
    return lambda works: Probe(feature=feature, names=names, otherwise=otherwise, works=works)
