"""Whether this machine can hold a case, checked before anything of it is allocated.

The harness knows no model: the dense model states the size of a case. Sizes are elements, in messages GiB.
"""

import os
from collections.abc import Iterable

from shardproof.harness.dense_model import dense_model, in_own_words
from shardproof.harness.errors import RequestError
from shardproof.harness.protocols import CaseLike, case_text

_WIDTH = 8
"""Bytes of an element: the truth is float64, tokens are int64."""
_SHAPES_ALONE = "dry"
_THREADS = 4096
"""The most ranks that are threads. Linux's default limits allow a thread for each; a step of more takes over an hour.
"""
_PROCESS_BYTES = 2**27
"""Memory of a rank that is a process, before it has a model: 128 MiB."""


def admit(cases: Iterable[CaseLike], engine: str, limit_bytes: int | None = None) -> None:
    """Raise RequestError for the first case with too many ranks, else for the first that is larger than `limit_bytes`
    (None: this machine's memory).

    For a case in a subject's own words only the number of ranks is known.
    """
    cases = tuple(cases)
    for case in cases:
        admit_ranks(case, engine)
    limit = (memory_bytes() if limit_bytes is None else limit_bytes) // _WIDTH
    for case in cases:
        if in_own_words(case):
            continue
        sizes = dense_model().sizes(case, shapes_alone=engine == _SHAPES_ALONE)
        if sum(sizes.values()) > limit:
            found = dense_model().too_large(case, limit)
            word = f"{found[0]}={getattr(case, found[0])}: " if found else ""
            legal = f"{found[0]}={found[1]}" if found else "smaller sizes"
            if engine != _SHAPES_ALONE:
                legal += ", --engine dry, or shardproof predict"
            amounts = ", ".join(f"{what} {_gib(size)}" for what, size in sizes.items())
            what = "its first micro-batch comes" if engine == _SHAPES_ALONE else "dense model and data in float64 come"
            rule = f"{what} to {_gib(sum(sizes.values()))} GiB ({amounts})"
            raise RequestError(
                f"case {case_text(case)!r}: {word}{rule}, and this machine has {_gib(limit)}; legal: {legal}"
            )


def select_admitted_cases(cases: Iterable[CaseLike], engine: str) -> tuple[CaseLike, ...]:
    """The cases that this machine can hold. Raises RequestError for the first one if it can hold none."""
    cases_left, first = [], None
    for case in cases:
        try:
            admit([case], engine)
            cases_left.append(case)
        except RequestError as problem:
            first = first or problem
    if first and not cases_left:
        raise first
    return tuple(cases_left)


def admit_ranks(case: CaseLike, engine: str) -> None:
    """Raise RequestError for a case with more ranks than the engine of this name can run on this machine.

    `dry` runs few of them, and the launcher has decided how many `torchrun` has.
    """
    most = {"inproc": (_THREADS, "threads"), "pool": (max(2, memory_bytes() // _PROCESS_BYTES), "processes")}
    if engine not in most or case.world_size <= most[engine][0]:
        return
    limit, kind = most[engine]
    sizes: dict[str, int] = getattr(case, "axis_sizes", {"world size": case.world_size})
    axis = max(sizes, key=sizes.__getitem__)
    fits = limit * sizes[axis] // case.world_size
    rule = f"comes to {case.world_size} ranks, and engine {engine} runs at most {limit} {kind} on this machine"
    legal = f"at most {axis}={fits}, or --engine dry" if fits else "smaller axes, or --engine dry"
    raise RequestError(f"case {case_text(case)!r}: {axis}={sizes[axis]}: {rule}; legal: {legal}")


def memory_bytes() -> int:
    """The memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _gib(elements: int) -> str:
    return f"{elements * _WIDTH / 2**30:.3g}"
