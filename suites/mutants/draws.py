"""The cases that hold a mutant to account: those that the profile `default` draws, smallest first.

Every property of the suites draws its cases from `suites.drawing.strategies`, in the number of the profile. The same
number is drawn here, from a fixed seed. So a mutant is killed by a case that a property meets.
"""

from functools import cache
from typing import Any

from shardproof.bugs.record import Words
from shardproof.reference.case import Case, CaseError
from shardproof.suites.drawing.profiles import PROFILES
from shardproof.suites.drawing.strategies import cases
from shardproof.suites.mutants.mutant import Mutant
from shardproof.suites.session.sampling import sampled

_SEED = 20251121


@cache  # a hundred suites and modes, asked for in turn
def _drawn(mode: str, fixed: tuple[tuple[str, Any], ...]) -> tuple[Case, ...]:
    found = sampled(cases(mode, **dict(fixed)), PROFILES["default"], _SEED)
    return tuple(sorted(dict.fromkeys(found), key=work))


def drawn(mode: str, fixed: Words) -> tuple[Case, ...]:
    """The cases of one property in the profile `default`, smallest first; `fixed` words are the property's own."""
    return _drawn(mode, tuple(sorted(fixed.items())))


def showing(mutant: Mutant, mode: str, dtype: str = "") -> tuple[Case, ...]:
    """The drawn cases of this mode that can show the mutant; of `dtype`, unless it shows in others alone."""
    if not dtype:
        return tuple(case for case in drawn(mode, mutant.suite) if mutant.shows(case))
    try:
        cases_of_dtype = drawn(mode, {"dtype": dtype, **mutant.suite})
    except CaseError:  # its property is about words that need another dtype
        cases_of_dtype = ()
    return tuple(case for case in cases_of_dtype if mutant.shows(case)) or showing(mutant, mode)


def work(case: Case) -> int:
    """How long a case takes, in no unit: ranks first, for each has its own pass over the model."""
    return case.world_size * case.layers * case.micro * case.steps * (500 + case.tokens * case.hidden)
