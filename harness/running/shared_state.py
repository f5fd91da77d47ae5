"""Whether ranks failed because they are threads: the first failed case of a run again, on ranks that are processes.

Asked once a run, of a foreign subject whose modules keep state that a process has once (`keepers`), so neither right
runs nor other failures take longer. If the case passes there, the cause says so and names these modules, of which
`per_rank` needs some. Times are seconds.
"""

from __future__ import annotations

import dis
import re
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from types import CodeType, FunctionType, ModuleType

from harness.checking.evidence import FAIL
from harness.diagnosing.rules.causes import reported
from harness.engines.processes.forked.pool import PoolEngine
from harness.errors import ShardproofError
from harness.protocols import CaseLike
from harness.running.proof import CaseResult, prove
from harness.running.request import Request
from harness.subject import NamedSubject, kept_per_rank, offers

LOSS_PARALLEL = "torch.distributed.tensor.parallel.loss"
"""The module of torch's loss_parallel, which changes DTensor for the process: the first rank to leave it ends it."""
_STORES = dis.opmap["STORE_GLOBAL"]
_CONTAINERS = (dict, list, set, OrderedDict, defaultdict, deque)
_NOT_FOREIGN = frozenset(sys.stdlib_module_names) | frozenset(
    "torch numpy pandas harness parallel reference reports bench shardproof pytest _pytest hypothesis sympy".split()
)
"""Packages that are not looked through: Python's, torch and what it rests on, and our own."""


def keepers(address: str) -> tuple[str, ...]:
    """The modules that the subject at module:object reaches and that keep state: a global that a function assigns, a
    container that is no constant, a default that can be changed.
    """
    return tuple(name for name in _reached(address.partition(":")[0]) if _keeps(sys.modules[name]))


def _reached(first: str) -> Iterator[str]:
    """The foreign modules that are loaded and reached from this one, itself first."""
    seen, waiting = {first}, [first]
    while waiting:
        name = waiting.pop()
        module = sys.modules.get(name)
        if module is None:
            continue
        yield name
        values = list(vars(module).values())
        found = {
            str(getattr(value, "__name__" if isinstance(value, ModuleType) else "__module__", "")) for value in values
        }
        found |= {name for code in _codes(module) for name in code.co_names}  # imported in a function
        fresh = {other for other in found if other in sys.modules and _is_foreign(other)} - seen
        seen |= fresh
        waiting += sorted(fresh)


def _is_foreign(name: str) -> bool:
    return name == LOSS_PARALLEL or name.partition(".")[0] not in _NOT_FOREIGN


def _keeps(module: ModuleType) -> bool:
    """Whether a module may keep state: a guess, of which the tries keep what is needed."""
    if module.__name__ == LOSS_PARALLEL:
        return True
    names = [name for name in vars(module) if not name.startswith("__") and not name.isupper()]
    if any(type(vars(module)[name]) in _CONTAINERS for name in names):
        return True
    if any(_STORES in code.co_code[::2] for code in _codes(module)):
        return True
    defaults = [value for function in _functions(module) for value in function.__defaults__ or ()]
    return any(type(value) in _CONTAINERS for value in defaults)


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    """The functions of a module and of its classes."""
    for value in list(vars(module).values()):
        if getattr(value, "__module__", "") != module.__name__:
            continue
        parts = list(vars(value).values()) if isinstance(value, type) else [value]
        plain = [part.__wrapped__ if isinstance(part, staticmethod | classmethod) else part for part in parts]
        yield from (part for part in plain if isinstance(part, FunctionType))


def _codes(module: ModuleType) -> Iterator[CodeType]:
    """The code of these functions, and of the functions in them."""
    waiting = [function.__code__ for function in _functions(module)]
    while waiting:
        code = waiting.pop()
        yield code
        waiting += [part for part in code.co_consts if isinstance(part, CodeType)]


_LIMIT_S = 60.0
_OURS = "parallel"
_CAUSES = re.compile(r"^causes: .*$", re.MULTILINE)
_MAYBE = re.compile(r"; if --engine pool passes, ranks share state.*?(?=\n|$)")


class OnProcesses:
    """The second opinion of a run: `of` looks at its results, and asks for the first that may fail for its threads."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._asked = False

    def of(self, result: CaseResult) -> CaseResult:
        """The result; where the same case passes on processes, with that as its cause."""
        if self._asked or not self._may_share(result):
            return result
        self._asked = True
        subject, limit_s = self._request.subject, min(self._request.timeout_s, _LIMIT_S)
        with suppress(ShardproofError):
            if self._passes(result.case, limit_s):
                return _told(result, _legal(subject))
        return result  # what cannot be found out leaves the failure as it is

    def _may_share(self, result: CaseResult) -> bool:
        """Whether a failed case of a foreign subject, on several threads, has modules that keep state."""
        asked, subject = self._request, self._request.subject
        if result.verdict != FAIL or result.machine or result.case.world_size == 1 or asked.engine != "inproc":
            return False
        return bool(subject.address) and subject.address.partition(".")[0] != _OURS and bool(_keepers(subject))

    def _passes(self, case: CaseLike, limit_s: float) -> bool:
        with PoolEngine() as pool:
            there = prove(case, self._request.subject, pool, device=self._request.device, timeout_s=limit_s)
        return there.evidence is not None and there.verdict != FAIL


def _keepers(subject: NamedSubject) -> tuple[str, ...]:
    """The modules that keep state; what a session enters for all ranks is none of theirs."""
    return tuple(
        name for name in keepers(subject.address) if name != LOSS_PARALLEL or not offers(subject.call, "session")
    )


def _legal(subject: NamedSubject) -> str:
    """What helps: modules that may keep the state; a context that only a session can enter once; processes."""
    found = _keepers(subject)
    modules = (*kept_per_rank(subject.call), *(name for name in found if name != LOSS_PARALLEL))
    session = "subject.session = torch.distributed.tensor.parallel.loss_parallel in place of each rank's own, "
    own = f"subject.per_rank = {modules!r} or some of these, which keep state, " if modules else ""
    return f"{session if LOSS_PARALLEL in found else ''}{own}or --engine pool"


def _told(result: CaseResult, legal: str) -> CaseResult:
    """The result with the cause that was found, before all others."""
    words = f"ranks share state here because they are threads: with --engine pool this case passes; legal: {legal}"
    verdicts = tuple(
        replace(one, message=_CAUSES.sub(lambda _: f"causes: {words}", _MAYBE.sub("", one.message)))
        if one.verdict == FAIL
        else one
        for one in result.verdicts
    )
    cause = reported("shared_state", words, words)
    diagnoses = {check: replace(told, causes=(cause, *told.causes)) for check, told in result.diagnoses.items()}
    return replace(result, verdicts=verdicts, diagnoses=diagnoses)
