"""The kill matrix, planned and computed: what `shardproof faults` runs, and a test per collective (`pytest --faults`).

Our own subject gets every mutant and variant in every mode that can host it, and every fault. Another subject, whose
source is not ours to change, gets the faults. `quick` takes one mode for each mutant (modes in turn) and few faults.
Collectives are read from the ledger of an undisturbed run. Every fault of one must be killed by a check or proved
equivalent; any other fault shows redundant traffic or a blind spot.

`scripts` makes scripts of planted bugs that need no shardproof: a small case and its right values in plain torch.
"""

import difflib
import itertools
import pickle
import traceback
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection

from shardproof.bugs.anchors import source_of
from shardproof.harness.dense_model import SUBJECT
from shardproof.harness.engines.engine import Engine
from shardproof.harness.engines.processes.forked.pool import ForkServer, hash_seed
from shardproof.harness.engines.processes.workers import ProcessEnd, Worker, receive
from shardproof.harness.engines.rank_environment import use_one_thread
from shardproof.harness.errors import MachineError, ProgramError, RankDied, RequestError, ShardproofError
from shardproof.harness.faults import Fault, faults_of
from shardproof.harness.protocols import CaseLike, case_text
from shardproof.harness.reproducing.repro import emit
from shardproof.harness.running.engines import engine_named
from shardproof.harness.running.ranks.capacity import admit
from shardproof.harness.running.ranks.execution import execute
from shardproof.harness.subject import NamedSubject, claims, own_cases, refusal, resolve_subject
from shardproof.reference.case import Case
from shardproof.suites.mutants.catalogue import HELD_BACK, MUTANTS, VARIANT_ROWS, Mutant, cases_showing
from shardproof.suites.mutants.field import FIELD, in_field
from shardproof.suites.mutants.kill_rows import Killed, faults_killed, mutant_killed

_SMALL = (
    "layers=1 hidden=16 heads=4 kv_heads=4 ffn=32 seq=8 batch=2 micro=2 steps=2 lr=0.1 mode={mode} tp=2 dp=3",
    "layers=1 hidden=16 heads=4 kv_heads=4 ffn=32 seq=8 batch=2 micro=2 steps=2 lr=0.1 mode={mode} tp=2",
)
"""Cases whose collectives are disturbed: the first one that a subject takes, with two axes of unequal size, or one
axis.
"""
_OPTIONS = (
    "metric=true recompute=full packed=true positions=rope qk_norm=true label_smoothing=0.1 clip=1.0 "
    "seq=32 batch=4 lr=0.3 seed=2"
)
"""Further words of a case: if a subject states its refusals, the collectives that they add are disturbed too.

There are enough tokens for every shard of the vocabulary.
"""
_AT_ONCE = 16
"""The number of faults that are surveyed beside one undisturbed run."""
_QUICK_FAULTS = 8
"""The faults of one mode in a quick run: spread evenly over all of them."""
_ROWS = {row.name: row for row in (*MUTANTS, *VARIANT_ROWS, *HELD_BACK)}


@dataclass(frozen=True, slots=True, kw_only=True)
class KillPlan:
    """Rows to come in one mode: a mutant or variant by name, or some faults of a case.

    One of their runs may take `timeout_s` seconds. Cases of a mutant are of `dtype` if such cases can show it. With
    `twin` the case of a mutant is also run without it.
    """

    mode: str
    name: str = ""
    case: CaseLike | None = None
    faults: tuple[Fault, ...] = ()
    timeout_s: float = 60.0
    dtype: str = ""
    twin: bool = False

    @property
    def rows(self) -> int:
        """How many rows the plan will give."""
        return len(self.faults) or 1


def plan_kills(
    subject: NamedSubject,
    *,
    quick: bool,
    only: str = "",
    cases: Sequence[CaseLike] = (),
    timeout_s: float = 60.0,
    dtype: str = "",
    field: bool = False,
) -> list[KillPlan]:
    """Plans of bugs in this subject. `only` "held-back" takes only those mutants, "open" everything else.

    With `field` they are mutants and variants of public issues, each beside its case without the bug, and no faults.
    With `cases` they are the faults of the collectives of these, and no mutants. With `dtype` cases are of that dtype,
    except for mutants that only other dtypes show. Raises RequestError if the subject takes none of the cases that
    would show a fault, refuses a given one, has no such mutants, or is not ours and a dtype is given.
    """
    if field and (cases or subject.name != SUBJECT):
        raise RequestError(f"--field: is of bugs planted in {SUBJECT}; legal: no CASE and no --subject")
    if dtype and (cases or subject.name != SUBJECT):
        raise RequestError(f"--dtype {dtype}: is for drawn cases of {SUBJECT}; legal: CASEs with dtype={dtype}")
    if cases:
        plans = _of_cases(subject, cases, quick, only, timeout_s)
    else:
        plans = plan_planted(quick=quick, only=only, field=field) if subject.name == SUBJECT else []
        if only != "held-back" and not field:
            with engine_named("inproc") as engine:
                for mode in claims(subject).modes:
                    plans += plan_disturbed(subject, mode, engine, quick=quick, timeout_s=timeout_s, dtype=dtype)
        if not plans and only == "held-back":
            rule = f"has no held-back mutants; legal: {SUBJECT}, or leave out --held-back"
            raise RequestError(f"subject={subject.name}: {rule}")
        if not plans:
            rule = "takes none of the cases whose collectives would be disturbed"
            raise RequestError(
                f"subject={subject.name}: {rule}; legal: one that takes {_SMALL[-1].format(mode='tp')!r}"
            )
    return [replace(plan, timeout_s=timeout_s, dtype=dtype) for plan in plans]


def _of_cases(
    subject: NamedSubject, cases: Sequence[CaseLike], quick: bool, only: str, timeout_s: float
) -> list[KillPlan]:
    if only:
        raise RequestError(f"--{only} with a CASE: mutants come with cases of their own; legal: leave one of them out")
    admit(cases, "inproc")
    for case in cases:
        if reason := refusal(case, subject):
            raise RequestError(f"case {case_text(case)!r}: {subject.name} does not take it: {reason}; legal: another")
    with engine_named("inproc") as engine:
        plans = [
            plan_disturbed(subject, case.mode, engine, quick=quick, only=case, timeout_s=timeout_s) for case in cases
        ]
    if not any(plans):
        rule = "its ranks issue no collective, so there is nothing to disturb"
        raise RequestError(f"case {case_text(cases[0])!r}: {rule}; legal: a case of two or more ranks")
    return list(itertools.chain.from_iterable(plans))


def plan_planted(*, quick: bool, only: str = "", field: bool = False) -> list[KillPlan]:
    """The mutants and variants of our own subject, all of them or `only` the held-back or the open ones.

    With `field` those of public issues, beside their twins.
    """
    plans = []
    for number, mutant in enumerate(_ROWS.values()):
        if only and mutant.held_back != (only == "held-back"):
            continue
        if field and not in_field(mutant):
            continue
        modes = sorted(mutant.modes)
        chosen = [modes[number % len(modes)]] if quick else modes
        plans += [KillPlan(name=mutant.name, mode=mode, twin=field) for mode in chosen]
    return plans


def plan_disturbed(
    subject: NamedSubject,
    mode: str,
    engine: Engine,
    *,
    quick: bool,
    only: CaseLike | None = None,
    timeout_s: float = 60.0,
    dtype: str = "",
) -> list[KillPlan]:
    """The faults of one mode, from the ledgers of undisturbed runs; none in a mode that the subject refuses.

    With `only` they are those of this case, with `dtype` those of the usual cases in that dtype.
    """
    plans, known = [], set[str]()
    for case in [only] if only else _cases_to_disturb(subject, mode, quick, dtype):
        events = execute(case, subject.call, engine, text=case_text(case), timeout_s=timeout_s).events
        faults = [fault for fault in faults_of(events, case.axes) if str(fault) not in known]
        known |= {str(fault) for fault in faults}
        chosen = faults[:: max(1, len(faults) // _QUICK_FAULTS)] if quick else faults
        plans += [KillPlan(mode=mode, case=case, faults=part) for part in _parts(chosen)]
    return plans


def _cases_to_disturb(subject: NamedSubject, mode: str, quick: bool, dtype: str) -> list[CaseLike]:
    """The cases of a mode whose collectives are disturbed: those that the subject names, else some that it takes."""
    if (own := own_cases(subject)) is not None:
        taken = [case for case in own if case.mode == mode and not refusal(case, subject)]
        return taken[:1] if quick else taken
    usual = [Case.parse(words.format(mode=mode) + (f" dtype={dtype}" if dtype else "")) for words in _SMALL]
    shown = [case for case in usual if not refusal(case, subject)][:1]
    knows = not quick and callable(getattr(subject.call, "refuses", None))
    wider = [Case.parse(f"{case} {_OPTIONS}") for case in shown if knows]
    return [*shown, *(case for case in wider if not refusal(case, subject))]


def _parts(faults: Sequence[Fault]) -> Iterator[tuple[Fault, ...]]:
    """Groups of faults to survey together. Faults of one target are in one group, and every group but the last has at
    least _AT_ONCE.
    """
    part: tuple[Fault, ...] = ()
    for _, of_target in itertools.groupby(faults, key=lambda fault: fault.target):
        part += (*of_target,)
        if len(part) >= _AT_ONCE:
            yield part
            part = ()
    yield from [part] if part else []


def run_kills(plans: Sequence[KillPlan], subject: NamedSubject, *, processes: int = 1) -> Iterator[Killed]:
    """The rows of these plans, each as soon as it is known; from several processes in no fixed order.

    Raises RankDied when a process ends.
    """
    if processes == 1:
        with engine_named("inproc") as engine:
            for plan in plans:
                yield from _kill_faults(plan, subject, engine)
        return
    # Not forked from this process: a fork would copy locks that the threads of an engine hold.
    server, target = ForkServer(hash_seed(0)), partial(_serve_plans, sent=pickle.dumps(subject))
    waiting, workers = deque(plans), list[Worker]()
    try:
        workers += (server.start(target) for _ in plans[:processes])
        at_work = {worker: worker for worker in workers}
        for worker in workers:
            worker.send(pickle.dumps(waiting.popleft()))
        while at_work:
            for worker, message in list(receive(at_work, None)):
                if isinstance(message, ProcessEnd):
                    raise RankDied(f"a process of the kill matrix ended: {message.words}", ranks=(), positions=())
                rows = pickle.loads(message)
                if isinstance(rows, Exception):
                    raise rows
                if waiting:
                    worker.send(pickle.dumps(waiting.popleft()))
                else:
                    del at_work[worker]
                yield from rows
    finally:
        for worker in workers:
            worker.close()
        server.close()


def _serve_plans(pipe: Connection, _memory: int, *, sent: bytes) -> None:
    """The loop of a process of the matrix: it answers each plan with its rows, or with the error that ended it."""
    use_one_thread()
    with engine_named("inproc") as engine:
        while True:
            plan = pickle.loads(pipe.recv_bytes())
            try:
                answer: object = _kill_faults(plan, pickle.loads(sent), engine)
            except ShardproofError as error:
                answer = error
            except Exception:  # importing a user's module may raise anything
                answer = RuntimeError(f"a process of the kill matrix raised:\n{traceback.format_exc()}")
            pipe.send(answer)


def _kill_faults(plan: KillPlan, subject: NamedSubject, engine: Engine) -> list[Killed]:
    if plan.case is not None:
        return faults_killed(plan.case, plan.faults, subject, engine, plan.timeout_s)
    return [mutant_killed(_ROWS[plan.name], plan.mode, engine, plan.timeout_s, plan.dtype, twin=plan.twin)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """A distinct collective of a case and its faults.

    Without faults, `refused` says why the subject has none in this mode, `problem` why it is unknown.
    """

    mode: str
    case: CaseLike | None = None
    faults: tuple[Fault, ...] = ()
    refused: str = ""
    problem: str = ""

    def __str__(self) -> str:
        return f"{self.mode}-{self.faults[0].target}" if self.faults else self.mode


def collectives(
    subject: NamedSubject, modes: Sequence[str], *, quick: bool, only: CaseLike | None = None, timeout_s: float = 60.0
) -> Iterator[Collective]:
    """The collectives to disturb in these modes; with `only` those of this case. `quick` takes few faults of a mode.

    Every mode has at least one row. Raises RequestError for an invalid subject.
    """
    with engine_named("inproc") as engine:
        for mode in modes:
            yield from _of_mode(subject, mode, engine, quick, only, timeout_s)


def _of_mode(
    subject: NamedSubject, mode: str, engine: Engine, quick: bool, only: CaseLike | None, timeout_s: float
) -> Iterator[Collective]:
    reason = refusal(only, subject) if only else ""
    if reason:
        yield Collective(mode=mode, refused=reason)
        return
    try:
        plans = plan_disturbed(subject, mode, engine, quick=quick, only=only, timeout_s=timeout_s)
    except ProgramError as error:
        yield Collective(mode=mode, problem=f"the subject does not finish undisturbed:\n{error}")
        return
    if not any(plan.faults for plan in plans):
        yield Collective(mode=mode, refused=f"{subject} takes no case of mode={mode} or issues no collective there")
    for plan in plans:
        for _, faults in itertools.groupby(plan.faults, key=lambda fault: fault.target):
            yield Collective(mode=mode, case=plan.case, faults=tuple(faults))


_TRIES = 4
"""The most cases that are searched for a wrong tensor: the two smallest that are drawn of each mode."""


def scripts(name: str, *, field: bool = False) -> Iterator[tuple[str, str, str]]:
    """(name, text of the script, "") of this bug, or of "all" open ones. Without a script: (name, "", the reason).

    With `field` only bugs of public issues count. Raises RequestError for a name that no open mutant or variant has.
    """
    known = {row.name: row for row in (FIELD if field else (*MUTANTS, *VARIANT_ROWS))}
    if name != "all" and name not in known:
        near = difflib.get_close_matches(name, known, 5, 0.0)
        which = "is no open mutant or variant" + (" of a public issue" if field else "")
        raise RequestError(f"emit-repro={name}: {which}; legal: all {' '.join(near)} ...")
    return _scripts(list(known.values()) if name == "all" else [known[name]])


def _scripts(rows: list[Mutant]) -> Iterator[tuple[str, str, str]]:
    with engine_named("inproc") as engine:
        for row in rows:
            text, why = "", row.equivalent or "the dense model has it too" * row.is_shared
            if not why:
                try:
                    text = _script(row, engine)
                except MachineError as error:  # a bug that takes too long does not cost the others their scripts
                    why = error.cause
            yield row.name, text, "" if text else why or "no returned tensor is wrong in small cases"


def _script(row: Mutant, engine: Engine) -> str:
    """The script of the first drawn case that fails, "" if none shows a wrong tensor."""
    sources = row.sources()
    cases = (case for mode in row.modes for case in cases_showing(row, mode)[:2])
    with row.subject() as subject:
        given = NamedSubject(
            name=SUBJECT, call=resolve_subject(subject).call, address=SUBJECT if subject == SUBJECT else ""
        )
        for case in itertools.islice(cases, _TRIES):
            if text := emit(case, given, engine, planted=sources):
                return text.replace('"""', f'"""{row.name}: {row.stands_for}\n\n{_diff(sources)}\n', 1)
    return ""


def _diff(sources: Mapping[str, str]) -> str:
    """The changes as a patch, for the docstring of a script."""
    lines: list[str] = []
    for module, text in sources.items():
        path = f"{module.replace('.', '/')}.py"
        lines += difflib.unified_diff(source_of(module).splitlines(), text.splitlines(), path, path, "", "", 1, "")
    return "\n".join(lines).replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
