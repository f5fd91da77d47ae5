"""Cases drawn of all foreign subjects: layouts, sizes, seeds and dtypes, in turn over the subjects of `bench.foreign`.

A subject may state the dtypes that it takes as `dtypes`; otherwise it takes those of DTYPES.
"""

import pkgutil
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hypothesis import strategies as st

from bench import foreign
from shardproof.harness.errors import RequestError
from shardproof.harness.plain_case import PlainCase
from shardproof.harness.protocols import CaseLike
from shardproof.harness.subject import NamedSubject, claims, named, refusal
from shardproof.suites.drawing.own_cases import around
from shardproof.suites.session.sampling import sampled

DTYPES = ("float64", "float32", "bfloat16")
SUBJECTS = tuple(sorted(module.name for module in pkgutil.iter_modules(foreign.__path__)))
"""Names of the modules of `bench.foreign`, each with one subject."""


class Drawn(NamedTuple):
    """A case and the subject that takes it."""

    subject: NamedSubject
    case: CaseLike


def subject_of(name: str) -> NamedSubject:
    """The foreign subject of this module. Raises RequestError where there is none."""
    if name not in SUBJECTS:
        raise RequestError(f"subject={name}: is no foreign subject; legal: {', '.join(SUBJECTS)}")
    return named(f"{foreign.__name__}.{name}:subject")


def drawn_cases(count: int, first_seed: int = 0, names: Sequence[str] = SUBJECTS, dtype: str = "any") -> list[Drawn]:
    """`count` cases, the same for the same arguments. The subjects take turns, so that a process has all of them."""
    names = [name for name in names if _dtypes(name, dtype)]
    shares = {name: count // len(names) + (place < count % len(names)) for place, name in enumerate(names)}
    of_subjects = [_cases_of(name, share, first_seed, dtype) for name, share in shares.items()]
    turns = [iter(cases) for cases in of_subjects]
    return [case for _ in range(max(shares.values(), default=0)) for turn in turns if (case := next(turn, None))]


def _cases_of(name: str, share: int, first_seed: int, dtype: str) -> list[Drawn]:
    """Cases of one subject; dtypes take turns, and layouts are drawn."""
    subject = subject_of(name)
    dtypes = _dtypes(name, dtype)
    shares = {known: share // len(dtypes) + (place < share % len(dtypes)) for place, known in enumerate(dtypes)}
    modes = claims(subject).modes
    of_dtypes = []
    for place, (known, many) in enumerate(shares.items()):
        of_modes = [around(subject, mode, {"dtype": known}) for mode in modes]
        legal = st.one_of(of_modes).filter(lambda case: not refusal(case, subject))
        of_dtypes.append(sampled(legal, many, 1000 * first_seed + place))
    return [Drawn(subject, case) for case in _in_turn(of_dtypes)]


def _dtypes(name: str, dtype: str) -> list[str]:
    return [known for known in getattr(subject_of(name).call, "dtypes", DTYPES) if dtype in ("any", known)]


def _in_turn(lists: Sequence[Sequence[PlainCase]]) -> Iterator[PlainCase]:
    for place in range(max(map(len, lists), default=0)):
        yield from (cases[place] for cases in lists if place < len(cases))
