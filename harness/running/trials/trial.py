"""A case on one subject: how it is run, and what its reference (our dense model, or its own truth) computes."""

import math
import signal
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from shardproof.harness.checking.measures.kinds import kind_of
from shardproof.harness.checking.measuring import MOVED
from shardproof.harness.dense_model import DenseModelLike, dense_model
from shardproof.harness.engines.calls.callers import is_user, shorten_path
from shardproof.harness.engines.engine import Engine
from shardproof.harness.engines.starvation import LONGEST, Starvation
from shardproof.harness.errors import MachineError, RequestError, TimeLimit, error_text
from shardproof.harness.protocols import CaseLike, Subject, case_text
from shardproof.harness.running.ranks.execution import execute
from shardproof.harness.running.ranks.watching import Execution
from shardproof.harness.running.truth.own import OwnTruth
from shardproof.harness.subject import NamedSubject, truth_of
from shardproof.harness.torch_internals.autograd import out_of_memory

if TYPE_CHECKING:
    from shardproof.harness.running.truth.own import OwnTruth

Function: TypeAlias = "Callable[..., Mapping[str, Tensor]]"
"""A function (case, device) -> outcome: of the dense model, or a truth of the subject's own (OwnTruth)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A reference of a case: the truth, and control runs beside it. Activations are among their outcomes.

    `control` also takes parts=n, the number of partial sums in place of its own choice. If our dense model is the truth
    it is `model`, which alone knows what widens limits (`measure_relu_flips`, `bound_adam`), and which rows nothing
    looks up. Its truth, control and relu flips take states=mapping, the subject's states from which their steps begin.
    If the subject brings the truth, it is `own`.
    """

    truth: Function
    control: Function
    model: DenseModelLike | None = None
    own: "OwnTruth | None" = None


def reference_of(subject: NamedSubject, engine: Engine, timeout_s: float = 60.0) -> Reference:
    """Reference of a subject: our dense model, or its own truth. Raises RequestError if that is not a legal truth."""
    dense = truth_of(subject)
    if dense is None:
        return decoder()
    own = OwnTruth(subject=subject, dense=dense, engine=engine, timeout_s=timeout_s)
    return Reference(truth=own, control=replace(own, control=True), own=own)


def decoder() -> Reference:
    """Our dense model as a truth."""
    model = dense_model()
    return Reference(truth=model.truth, control=model.control, model=model)


_LATE_S = 0.5
"""How long after its limit a body is interrupted. An engine inside it ends first, since its error can say more."""
_AGAIN_S = 1.0
"""How long after an interruption the next one comes, in case the body has caught it."""


@contextmanager
def in_time(limit_s: float, what: str, alive: Callable[[], object] = str) -> Iterator[None]:
    """Raise TimeLimit in a body that takes longer; `what` says in words what is computed.

    The time for which the process waits for a processor is added to the limit, with a call of `alive` each time.

    Nothing interrupts code that never comes back from a native function, a body outside of the main thread, and a body
    in a program with an alarm of its own.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or not hasattr(signal, "setitimer") or signal.getsignal(signal.SIGALRM) is not signal.SIG_DFL:
        yield
        return

    starvation, latest_s = Starvation(), time.monotonic() + LONGEST * limit_s

    def late(_number: int, frame: FrameType | None) -> None:
        lost_s = min(starvation.look(), latest_s - time.monotonic())
        if lost_s > _LATE_S:
            signal.setitimer(signal.ITIMER_REAL, lost_s, _AGAIN_S)
            alive()
            return
        busy = f"{words}; " if (words := starvation.words) else ""
        cause = f"time limit of {limit_s:g} s: {what} is at work{_place(frame)}; {busy}legal: a larger --timeout"
        raise TimeLimit(cause, ranks=(), positions=())

    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, limit_s + _LATE_S, _AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


def _place(frame: FrameType | None) -> str:
    """The innermost line of the user's code: " at model.py:7 in forward"."""
    while frame and not is_user(frame.f_code.co_filename):
        frame = frame.f_back
    return f" at {shorten_path(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}" if frame else ""


PARTS: Mapping[str, str] = {"truth": "the dense model", "control": "a control run of the dense model"}
"""Words for the computations in these parts of a case."""
BOUNDED = frozenset({*PARTS, "recorded", "plain", "again"})
"""Parts of a case that end by themselves within its time limit, unless native code keeps the process busy."""
_BETWEEN = "checks"
"""The part of a case between and around the others."""


EXPLAINING = ("explained", "located", "elsewhere")
"""Parts of a case that explain a failure, and that no verdict needs."""
EXPLAINED_IN = 10
"""All runs that explain a failed case, or search for its line `when:`, may together take this many time limits."""


@dataclass(slots=True)
class Budget:
    """Time for all runs that explain one failed case: until `end_s` on the monotonic clock.

    `refused` are the parts that were not run because no time was left. Runs that a verdict needs do not ask for time.
    """

    end_s: float = math.inf
    refused: list[str] = field(default_factory=list)

    def begin(self, seconds: float) -> None:
        """Let the explanations end after these seconds, unless they have begun already."""
        self.end_s = min(self.end_s, time.monotonic() + seconds)

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
        return self.end_s - time.monotonic()


Asked = tuple[Function, tuple[tuple[str, int], ...]]
"""A function of the reference and the words that it was given."""


@dataclass(slots=True)
class Truths:
    """Results of the dense model for the latest case, which serve the next cases that are alike to the dense model."""

    _case: CaseLike | None = None
    _outcomes: dict[Hashable, Mapping[str, Tensor]] = field(default_factory=dict)

    def of(self, case: CaseLike, name: Hashable, compute: Callable[[], Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
        """The outcome of this function of the reference for this case, computed unless it is known."""
        if case != self._case:  # frees the results of the case before, ahead of computing more
            self._case, self._outcomes = case, {}
        if name not in self._outcomes:
            self._outcomes[name] = compute()
        return self._outcomes[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A case on one subject, and how it is run. `seconds` and `problems` fill up as its runs end.

    `problems`: what the subject could not answer (expectation, activations) -> why. `given` fills up with the tensors
    that the truth must take from the subject's outcome (DenseModelLike.list_given_kinds). `known` fills up with what
    the reference computed; trials of one case may share it, and trials of cases that are alike to the dense model may
    share `truths`. `heard` is called with every part of the case as it begins. `verdict_alone`: once a tensor is wrong
    that rounding cannot explain, the others do not matter. `budget` is the time to explain a failure of the case, which
    trials of other cases share.
    """

    case: CaseLike
    subject: NamedSubject
    engine: Engine
    reference: Reference = field(default_factory=decoder)
    device: str = "cpu"
    timeout_s: float = 60.0
    seconds: dict[str, float] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    known: dict[Asked, Mapping[str, Tensor]] = field(default_factory=dict)
    truths: Truths = field(default_factory=Truths)
    heard: Callable[[str], object] = str
    given: dict[str, Tensor] = field(default_factory=dict)
    verdict_alone: bool = False
    budget: Budget = field(default_factory=Budget)

    @property
    def text(self) -> str:
        """The case's text."""
        return case_text(self.case)

    def of_case(self, case: CaseLike) -> "Trial":
        """A trial of another case that is run as this one."""
        return replace(self, case=case, seconds={}, problems={}, known={}, given={})

    @property
    def limit_s(self) -> float:
        """How long a run that begins now may take."""
        return min(self.timeout_s, max(self.budget.left_s, 0.0))

    def has_time(self, part: str) -> bool:
        """Whether there is time for this part of an explanation. A part without time is noted."""
        left = self.budget.left_s > 0
        self.budget.refused += [] if left or part in self.budget.refused else [part]
        return left

    @contextmanager
    def time_part(self, part: str) -> Iterator[None]:
        """Note how long the body takes, also when it raises."""
        start_s = time.perf_counter()
        self.heard(part)
        self.engine.alive = lambda: self.heard(part)  # the time of this part begins anew
        try:
            yield
        finally:
            self.engine.alive = str
            self.heard(_BETWEEN)
            self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - start_s

    def run(self, subject: Subject, case: CaseLike | None = None, *, record: bool = False, **how: Any) -> Execution:
        """Run this subject once on the trial's engine, in the trial's case or in another; `how` as `execute` has it."""
        text = case_text(case) if case else self.text
        how |= {"text": text, "record": record, "device": self.device, "timeout_s": self.limit_s}
        return execute(case or self.case, subject, self.engine, **how)

    def dense(self, function: Function, *, part: str = "truth", **words: int) -> Mapping[str, Tensor]:
        """Result of a function of the reference, on the CPU, once for trials that share `known`."""
        asked = function, tuple(words.items())
        if asked not in self.known:
            self.known[asked] = self.compute_anew(function, part=part, **words)
        return self.known[asked]

    def true(self) -> Mapping[str, Tensor]:
        """The truth, computed for the one case that stands for all cases that are alike to the dense model."""
        truth, model = self.reference.truth, self.reference.model
        if (truth, ()) not in self.known:
            case: CaseLike = model.alike(self.case) if model else self.case
            self.known[truth, ()] = self.truths.of(case, truth, lambda: self.compute_anew(truth, case))
        return self.known[truth, ()]

    def initial(self, truth: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The values of parameters before the first step; empty if this truth has none after a step."""
        own, model = self.reference.own, self.reference.model
        if not any(kind_of(name) in MOVED for name in truth):
            return {}
        if own is not None:
            return own.initial.get(self.text, {})
        return self.dense(model.initial) if model else {}

    def compute_anew(
        self, function: Function, case: CaseLike | None = None, /, *, part: str = "truth", **words: Any
    ) -> Mapping[str, Tensor]:
        """Compute a function of the reference anew, timed as this part.

        Raises RequestError when the reference cannot compute it, MachineError for too much time or memory.
        """
        if self.given:
            words["given"] = self.given
        try:
            with (
                self.time_part(part),
                in_time(self.limit_s, PARTS.get(part, PARTS["truth"]), partial(self.heard, part)),
            ):
                outcome: Mapping[str, Tensor] = function(case or self.case, torch.device(self.device), **words)
        except (ValueError, OSError) as problem:
            raise RequestError(f"case {self.text!r}: the dense model cannot compute it: {problem}") from problem
        except (MemoryError, RuntimeError) as problem:
            if not out_of_memory(problem):
                raise
            cause = f"{PARTS['truth']} needs more memory than there is: {error_text(problem)}"
            raise MachineError(cause, ranks=(), positions=()) from problem
        return {key: tensor.detach().cpu() for key, tensor in outcome.items()}


def too_long(part: str, limit_s: float) -> str:
    """Message about a part of a case that had to be ended from outside."""
    what = PARTS.get(part, f"the part {part!r} of the case")
    return f"time limit of {limit_s:g} s: {what} did not end, and could not be interrupted; legal: a larger --timeout"
