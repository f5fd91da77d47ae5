"""Whether ranks failed because they are threads: the first failed case of a run again, on ranks that are processes.

A foreign subject whose modules keep state that a process has once (`keepers`) is run again, once a run. If the case
passes there, the modules that `per_rank` needs are found by trying. A fresh process imports what the subject imports
and forks one child for each try, so that none sees what another has left. The modules whose state a run in threads
changes are tried together, then each is left out once. The result is the modules of a run that passed. Times: seconds.
"""

import dis
import importlib
import multiprocessing
import pickle
import re
import sys
import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from types import CodeType, FunctionType, ModuleType
from typing import Any, cast

from shardproof.harness.checking.evidence import FAIL
from shardproof.harness.diagnosing.causes.cause import reported
from shardproof.harness.engines.processes.forked.pool import PoolEngine
from shardproof.harness.engines.threads.inproc import InprocEngine
from shardproof.harness.engines.threads.state.module_state import namespaces_of
from shardproof.harness.errors import ShardproofError
from shardproof.harness.protocols import CaseLike
from shardproof.harness.running.forked_process import forked
from shardproof.harness.running.proof import prove
from shardproof.harness.running.request import Request
from shardproof.harness.running.result import CaseResult
from shardproof.harness.subject import NamedSubject, kept_per_rank, offers

LOSS_PARALLEL = "torch.distributed.tensor.parallel.loss"
"""The module of torch's loss_parallel, which changes DTensor for the process: the first rank to leave it ends it."""
_STORES = dis.opmap["STORE_GLOBAL"]
_CONTAINERS = (dict, list, set, OrderedDict, defaultdict, deque)
_NOT_FOREIGN = frozenset(sys.stdlib_module_names) | frozenset(
    "torch numpy pandas shardproof pytest _pytest hypothesis sympy".split()
)
"""Packages that are not looked through: Python's, torch and what it rests on, and our own."""


def keepers(address: str) -> tuple[str, ...]:
    """The modules that the subject at module:object reaches and that keep state.

    State is a global that a function assigns, a container that is no constant, a default that can be changed.
    """
    return tuple(name for name in _reached(address.partition(":")[0]) if _keeps(sys.modules[name]))


@contextmanager
def searching(case: CaseLike, subject: NamedSubject, *, limit_s: float) -> Iterator[Callable[[], tuple[str, ...]]]:
    """Look, in another process, for the modules with which as `per_rank` the case passes in threads.

    Yields what waits for the answer: () where none are found in time.
    """
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_search, args=(theirs, pickle.dumps((case, subject)), limit_s), daemon=True)
    process.start()
    theirs.close()

    def answer() -> tuple[str, ...]:
        with suppress(EOFError, OSError):
            if wait([mine, process.sentinel], 2 * limit_s) and mine.poll(1.0):
                return cast(tuple[str, ...], mine.recv())
        return ()

    try:
        yield answer
    finally:
        process.kill()
        process.join()


def _search(answer: Connection, sent: bytes, limit_s: float) -> None:
    """The fresh process: every try in a child of its own."""
    until_s = time.monotonic() + limit_s
    case, subject = pickle.loads(sent)
    tries = _Tries(case, subject, until_s)
    for name in tries.of(tries.imported) or ():  # what the run imports is imported before the other tries
        with suppress(Exception):
            importlib.import_module(name)
    needed = list(tries.of(tries.changed) or ())
    if not needed or not tries.passes(needed):
        answer.send(())
        return
    for name in list(needed):
        rest = [other for other in needed if other != name]
        if rest and tries.passes(rest):
            needed = rest
    answer.send(tuple(needed))


@dataclass(frozen=True, slots=True)
class _Tries:
    """Runs of the case in threads, each in a forked child."""

    case: CaseLike
    subject: NamedSubject
    until_s: float

    def of(self, what: Callable[[], Any]) -> Any:
        """Result of the child; None where it fails, or has no time left."""
        child = forked(lambda connection: connection.send(what()))
        try:
            if child and child.connection.poll(max(0.0, self.until_s - time.monotonic())):
                return child.connection.recv()
        except (EOFError, OSError, pickle.UnpicklingError):
            pass
        finally:
            if child:
                child.kill()
                child.close()
        return None

    def imported(self) -> tuple[str, ...]:
        """The modules that a run imports."""
        before = set(sys.modules)
        self._ran(())
        return tuple(name for name in sys.modules if name not in before and _is_foreign(name))

    def changed(self) -> tuple[str, ...]:
        """The modules whose state a run in threads changes."""
        names = keepers(self.subject.address)
        before = {name: _state(name) for name in names}
        self._ran(())
        return tuple(name for name in names if _state(name) != before[name])

    def passes(self, modules: Sequence[str]) -> bool:
        """Whether the case passes where every rank has the state of these modules for itself."""
        return bool(self.of(lambda: self._ran(modules)))

    def _ran(self, modules: Sequence[str]) -> bool:
        per_rank = (*kept_per_rank(self.subject.call), *modules)
        subject = replace(self.subject, call=_WithState(self.subject.call, per_rank), address="")
        with suppress(ShardproofError), InprocEngine() as engine:
            result = prove(self.case, subject, engine, timeout_s=max(1.0, self.until_s - time.monotonic()))
            return result.evidence is not None and result.verdict != FAIL
        return False


class _WithState:
    """The subject with these modules as its `per_rank`."""

    def __init__(self, call: Any, per_rank: tuple[str, ...]) -> None:
        self._call = call
        self.per_rank = per_rank

    def __call__(self, case: Any, device: Any) -> Any:
        """The subject's outcome."""
        return self._call(case, device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)


def _reached(first: str) -> Iterator[str]:
    """The foreign modules that are loaded and reached from this one, itself first."""
    seen, waiting = {first}, [first]
    while waiting:
        name = waiting.pop()
        module = sys.modules.get(name)
        if module is None:
            continue
        yield name
        values = [(value, isinstance(value, ModuleType)) for value in list(vars(module).values())]
        found = {str(getattr(value, "__name__" if is_module else "__module__", "")) for value, is_module in values}
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


def _state(name: str) -> list[dict[str, Any]]:
    """Content of the places of a module: what its names refer to, and what is in its containers."""
    places = namespaces_of((name,))
    return [{key: _print(value) for key, value in place.read().items()} for place in places]


def _print(value: Any) -> Any:
    if isinstance(value, dict):
        return id(value), len(value), tuple((id(key), id(item)) for key, item in list(value.items()))
    if type(value) in _CONTAINERS:
        return id(value), tuple(map(id, list(value)))
    return id(value)


_LIMIT_S = 60.0
_OURS = "shardproof.parallel."
_CAUSES = re.compile(r"^causes: .*$", re.MULTILINE)
_MAYBE = re.compile(r"; if --engine pool passes, ranks share state.*?(?=\n|$)")


class OnProcesses:
    """The second opinion of a run: `of` looks at its results, and runs the first that may fail for its threads."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._asked = False

    def of(self, result: CaseResult) -> CaseResult:
        """The result; where the same case passes on processes, with that as its cause."""
        if self._asked or not self._may_share(result):
            return result
        self._asked = True
        subject, limit_s = self._request.subject, min(self._request.timeout_s, _LIMIT_S)
        with suppress(ShardproofError), searching(result.case, subject, limit_s=limit_s) as needed:
            with PoolEngine() as pool:
                there = prove(result.case, subject, pool, device=self._request.device, timeout_s=limit_s)
            if there.evidence is not None and there.verdict != FAIL:
                modules = needed()
                per_rank = (*kept_per_rank(subject.call), *modules) if modules else ()
                return _with_cause(result, _legal(per_rank, LOSS_PARALLEL in _keepers(subject)))
        return result  # what cannot be found out leaves the failure as it is

    def _may_share(self, result: CaseResult) -> bool:
        """Whether a failed case of a foreign subject, on several threads, has modules that keep state."""
        asked, subject = self._request, self._request.subject
        if result.verdict != FAIL or result.machine or result.case.world_size == 1 or asked.engine != "inproc":
            return False
        return bool(subject.address) and not subject.address.startswith(_OURS) and bool(_keepers(subject))


def _keepers(subject: NamedSubject) -> tuple[str, ...]:
    """The modules that keep state; what a session enters for all ranks is none of theirs."""
    return tuple(
        name for name in keepers(subject.address) if name != LOSS_PARALLEL or not offers(subject.call, "session")
    )


def _legal(per_rank: tuple[str, ...], in_loss_parallel: bool) -> str:
    """Words that help: the modules with which the case passed; a context that a session enters once; processes."""
    if per_rank:
        return f"subject.per_rank = {per_rank!r}, with which it passes here too"
    session = "subject.session = torch.distributed.tensor.parallel.loss_parallel in place of each rank's own, or "
    return f"{session if in_loss_parallel else ''}--engine pool"


def _with_cause(result: CaseResult, legal: str) -> CaseResult:
    """The result with the cause that was found, before all others."""
    words = f"ranks share state here because they are threads: with --engine pool this case passes; legal: {legal}"
    failed = [each.verdict == FAIL for each in result.verdicts]
    messages = [_CAUSES.sub(lambda _: f"causes: {words}", _MAYBE.sub("", each.message)) for each in result.verdicts]
    changed = zip(result.verdicts, messages, failed, strict=True)
    verdicts = [replace(each, message=message) if wrong else each for each, message, wrong in changed]
    cause = reported("shared_state", words, words)
    diagnoses = {check: replace(one, causes=(cause, *one.causes)) for check, one in result.diagnoses.items()}
    return replace(result, verdicts=tuple(verdicts), diagnoses=diagnoses)
