"""The line `when:` of failed cases: which words of a case its failure needs, found by running it with other words.

Failures with the same first place count as one. Of each such group the simplest case is examined, the simplest groups
first. One failure takes at most `Request.when_s` seconds, and all together three times as long. Seconds in which the
process waits for a processor do not count. Before the searches the simplest failed case is run with ranks that are
processes.
"""

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, replace
from io import StringIO
from multiprocessing.connection import Connection
from typing import Any

from shardproof.harness.checking.checks import CHECKS, LAWS, Check, select_checks_by_need
from shardproof.harness.checking.records import Repeats
from shardproof.harness.diagnosing.diagnosis import BIT_FOR_BIT
from shardproof.harness.diagnosing.needed_words import needed_words
from shardproof.harness.diagnosing.tried_words import OutOfTime, Proved, confirm_words
from shardproof.harness.diagnosing.words_text import NeededWords
from shardproof.harness.engines.starvation import Starvation
from shardproof.harness.errors import ShardproofError
from shardproof.harness.protocols import CaseLike, case_text, without_saving
from shardproof.harness.running.forked_process import fork_worker
from shardproof.harness.running.request import Request
from shardproof.harness.running.result import CaseResult
from shardproof.harness.running.store import STOPPED, Store
from shardproof.harness.running.trials.trial import EXPLAINED_IN
from shardproof.harness.subject import NamedSubject, case_of, domains_of, truth_of
from shardproof.harness.verdicts.facts import When, WhenKind
from shardproof.harness.verdicts.verdict import FAIL, PASS, Verdict

_IN_ALL = 3
"""The number of failures that may each take their whole time."""
_SEARCH = 0.8
"""The share of a failure's time for the search. In the rest the cases that the found statements describe are run."""
_LONGEST = 3
"""How many times its seconds a search may take on a machine that others keep busy."""
_GRACE_S = 10.0
"""How much longer than its time the process of the experiments may take, to end the case that it runs."""
ENGINES = ("inproc", "pool", "dry")
"""Engines that can run other cases than those of the request."""
_OF_ONE_RUN = CHECKS.keys() - select_checks_by_need(CHECKS, Repeats) | {"run"}
"""Checks that need a single run of a case."""
_WITHOUT_LAWS = {**CHECKS}
"""A copy of CHECKS: to CHECKS itself `prove` would add LAWS."""
Proves = Callable[..., CaseResult]
"""Proves a case by `checks` within `timeout_s`, with a second run if `repeat` is given, and explains nothing."""
Proving = Callable[[Request], AbstractContextManager[Proves]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A failed case and its verdicts. `explained_s` are the seconds that explaining its failure has taken."""

    case: CaseLike
    verdicts: tuple[Verdict, ...]
    explained_s: float = 0.0

    @property
    def first(self) -> Verdict:
        """The first failed verdict. Differences between replicas or runs come last, as they may be rounding alone."""
        failed = [verdict for verdict in self.verdicts if verdict.verdict == FAIL]
        return min(failed, key=lambda verdict: verdict.check in BIT_FOR_BIT)

    @property
    def fault(self) -> tuple[Verdict, ...]:
        """The first failed verdict and those with the same causes; the others are another fault."""
        failed = [verdict for verdict in self.verdicts if verdict.verdict == FAIL]
        return tuple(verdict for verdict in failed if _fault_of_verdict(verdict) == _fault_of_verdict(self.first))

    @property
    def size(self) -> tuple[object, ...]:
        """Order of failures, the simplest first: float64, few ranks, few words."""
        text = case_text(self.case)
        return self.case.dtype != "float64", self.case.world_size, len(text.split()), text


def look_for_words(
    failures: Sequence[Failed], request: Request, proving: Proving, store: Store, *, apart: bool
) -> dict[str, tuple[Verdict, ...]]:
    """The verdicts of failed cases with their line `when:`, by the text of the case. Each is stored as it is found.

    With `apart` another process looks for them, so that a case that ends its process does not end this one. After
    Ctrl-C the verdicts found so far are returned, and the store notes it.
    """
    verdicts: dict[str, tuple[Verdict, ...]] = {}
    try:
        for found in _prove_each(failures, request, proving, apart=apart):
            store.add_when(found)
            verdicts |= found
    except KeyboardInterrupt:
        store.notes.append(STOPPED)
        return verdicts
    if request.when_s and request.engine in ENGINES:  # for cases that the process did not reach
        late = When(kind=WhenKind.NOT_SEARCHED)
        left = {case_text(one.case): _with_when(one, late) for one in failures if case_text(one.case) not in verdicts}
        store.add_when(left)
        verdicts |= left
    return verdicts


def _prove_each(
    failures: Sequence[Failed], request: Request, proving: Proving, *, apart: bool
) -> Iterator[dict[str, tuple[Verdict, ...]]]:
    """Yield the verdicts with their line, one group of failures after the other."""
    if not failures or not request.when_s or request.engine not in ENGINES:
        return
    if not apart:
        yield from _examine_failures(failures, request, proving)
        return
    worker = fork_worker(lambda connection: _send_objects(connection, _examine_failures(failures, request, proving)))
    end_s = time.monotonic() + _LONGEST * _IN_ALL * request.when_s + _GRACE_S
    try:
        while worker and worker.pipe.poll(max(end_s - time.monotonic(), 0)):
            yield worker.pipe.recv()
    except (EOFError, ConnectionResetError, BlockingIOError):  # all were received, or the process ended
        pass
    finally:
        if worker:
            worker.close()


def _send_objects(connection: Connection, objects: Iterable[object]) -> None:
    for each in objects:
        connection.send(each)


def _examine_failures(
    failures: Sequence[Failed], request: Request, proving: Proving
) -> Iterator[dict[str, tuple[Verdict, ...]]]:
    groups: dict[str, list[Failed]] = {}
    for failed in sorted(failures, key=lambda failed: failed.size):
        groups.setdefault(failed.first.site, []).append(failed)
    clock = Starvation()
    with proving(request) as prove_case, redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        waiting = [*groups.values()]
        start_s = time.monotonic()
        if _passes_on_processes(waiting[0][0], request, proving):
            first = waiting[0].pop(0)
            waiting = [group for group in waiting if group]
            when = When(kind=WhenKind.ONLY_IN_THREADS, case=case_text(first.case))
            yield {case_text(first.case): _with_when(first, _with_cost(when, 1, start_s))}
        for group in waiting:
            start_s, tried = time.monotonic(), list[CaseLike]()

            def prove_and_count(case: CaseLike, tried: list[CaseLike] = tried, **how: Any) -> CaseResult:
                tried.append(case)
                return prove_case(case, explain=False, **how)

            left_s = _IN_ALL * request.when_s - clock.own_seconds(_LONGEST)
            own_s = min(request.when_s, left_s, EXPLAINED_IN * request.timeout_s - group[0].explained_s)
            found = words_needed(group[0], request.subject, prove_and_count, own_s)
            when = _with_cost(found.when, len(tried), start_s)
            alike = [failed for failed in group if failed is group[0] or not _contradicts(failed.case, found)]
            yield {case_text(failed.case): _with_when(failed, when) for failed in alike}
            if others := [failed for failed in group if failed not in alike]:
                waiting.append(others)


def _with_cost(when: When, runs: int, start_s: float) -> When:
    """The line `when:` with its cost: how many cases were run for it, and how many seconds that took."""
    return replace(when, runs=runs, seconds=round(time.monotonic() - start_s, 3))


def _passes_on_processes(failed: Failed, request: Request, proving: Proving) -> bool:
    """Whether a case of a foreign subject that failed on threads passes if every rank is a process."""
    address = request.subject.address
    if (
        request.engine != "inproc"
        or failed.case.world_size == 1
        or not address
        or address.startswith("shardproof.parallel.")
    ):
        return False
    case = failed.case.but(**without_saving(failed.case))
    with suppress(ShardproofError), proving(replace(request, engine="pool", profile=())) as prove_case:
        there = prove_case(case, explain=False, timeout_s=min(request.timeout_s, request.when_s))
        return there.evidence is not None and there.verdict == PASS
    return False  # the case cannot be run on processes, so nothing is known


def _contradicts(case: CaseLike, found: NeededWords) -> bool:
    """Whether the case has a value with which the examined case is known to pass."""
    return any(getattr(case, one.word, None) == each.value for one in found.needed for each in one.right)


def _fault_of_verdict(verdict: Verdict) -> object:
    """What distinguishes the faults of one case."""
    return verdict.failure.fault if verdict.failure else None


def _with_when(failed: Failed, when: When) -> tuple[Verdict, ...]:
    """The verdicts of a case with the words that the fault needs, or a note that its fault was not the one examined."""
    fault, other = failed.fault, When(kind=WhenKind.OTHER_FAULT)
    return tuple(
        replace(one, failure=replace(one.failure, when=when if one in fault else other)) if one.failure else one
        for one in failed.verdicts
    )


def words_needed(failed: Failed, subject: NamedSubject, prove: Proves, seconds: float) -> NeededWords:
    """The words that the failure of this case needs, searched for within these seconds.

    Each statement is then read as it will be printed, and the case that it describes is run with every check and law,
    unless the search already did that.
    """
    with tempfile.TemporaryDirectory() as folder:
        saved = {"save": f"{folder}/save"} if getattr(failed.case, "save", "") else {}
        fails = _Fails(failed, subject, prove, saved, _SEARCH * seconds)
        found = needed_words(failed.case, domains_of(failed.case, subject), fails.in_search)
        fails.limit_s = seconds
        return confirm_words(found, failed.case, lambda text: case_of(text, subject), fails.by_all_checks)


class _Fails:
    """Whether a case fails in the same way as the examined one; None if that cannot be told.

    Raises OutOfTime after `limit_s`. A case whose first failure is of another kind fails for another reason, and shows
    nothing. The search leaves out laws, which run further cases, unless the fault breaks laws alone. It repeats runs
    only if the fault shows in no check of a single run. No case is run twice by the same checks.
    """

    def __init__(
        self, failed: Failed, subject: NamedSubject, prove: Proves, words: Mapping[str, Any], limit_s: float
    ) -> None:
        mine = {verdict.check for verdict in failed.fault}
        others = (verdict for verdict in failed.verdicts if verdict.verdict == FAIL and verdict not in failed.fault)
        self._reasons = {_reason_of_verdict(verdict) for verdict in failed.fault}
        self._others = {_reason_of_verdict(verdict) for verdict in others}
        self._laws = frozenset() if mine <= {*LAWS} else frozenset(LAWS)
        """Checks that run other cases too, so that their failure says nothing about this one alone."""
        self._in_search = _WITHOUT_LAWS if self._laws and truth_of(subject) is not None else CHECKS
        self._repeat = not mine & _OF_ONE_RUN
        self._prove, self._words, self.limit_s = prove, words, limit_s
        self._clock = Starvation()
        self._known: dict[tuple[str, bool], Proved] = {}

    def in_search(self, case: CaseLike) -> bool | None:
        """The answer by the checks of the search."""
        return self._judge(case, self._in_search)[0]

    def by_all_checks(self, case: CaseLike) -> Proved:
        """The answer by every check and law, with the names of those that fail."""
        return self._judge(case, CHECKS)

    def _judge(self, case: CaseLike, checks: Mapping[str, Check]) -> Proved:
        key = case_text(case), checks is CHECKS
        if key not in self._known:
            self._known[key] = self._judge_result(case, self._prove_case(case, checks))
        return self._known[key]

    def _judge_result(self, case: CaseLike, result: CaseResult | None) -> Proved:
        if not result:
            return None, ()
        failures = [verdict for verdict in result.verdicts if verdict.verdict == FAIL]
        names = tuple(sorted({verdict.check for verdict in failures}))
        mine = [verdict for verdict in failures if verdict.check not in self._laws]
        mine = [verdict for verdict in mine if _reason_of_verdict(verdict) not in self._others]
        if mine:
            first = Failed(case=case, verdicts=tuple(mine)).first
            return (True if _reason_of_verdict(first) in self._reasons else None), names
        return (False if failures or result.verdict == PASS else None), names  # the rest are laws or other faults

    def _prove_case(self, case: CaseLike, checks: Mapping[str, Check]) -> CaseResult | None:
        """The result of a case; None if it is refused. Raises OutOfTime if the time ends first."""
        left_s = self.limit_s - self._clock.own_seconds(_LONGEST)
        if left_s <= 0:
            raise OutOfTime
        kept = {word: value for word, value in self._words.items() if getattr(case, word)}
        try:
            case = case.but(**kept) if kept else case
            result = self._prove(case, checks=checks, repeat=self._repeat, timeout_s=left_s)
        except (ShardproofError, ValueError):
            return None
        if self._clock.own_seconds(_LONGEST) >= self.limit_s and result.verdict != PASS:
            raise OutOfTime
        return result


def _reason_of_verdict(verdict: Verdict) -> tuple[str, str]:
    """What the failure is compared by: the check, and how calls differ or what was raised."""
    return verdict.check, verdict.kind
