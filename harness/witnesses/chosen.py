"""Some steps of a longer run: where they begin and end, a context around them alone, and the closed form of them.

A step ends with the last optimizer step before the next forward, as in the ledger (harness.recording.attribution). The
last one is known only when the forward comes. So an earlier run of the same case shows after how many optimizer steps
each step ends (`step_ends`), and later runs count them (`watch_steps`). From 0 on, "2:4" are the steps 2 and 3.
A witness is on over one such stretch: the torch profiler (`TorchTrace`), and nsys's capture on a GPU (`capture_range`).
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile

from shardproof.harness.errors import MachineError, error_text
from shardproof.harness.protocols import CaseLike, TermLike
from shardproof.harness.recording.attribution import Attribution
from shardproof.harness.recording.observations import Stepped, read_observation
from shardproof.harness.recording.watch import Watch
from shardproof.harness.terms import ClosedForm, Term, closed_form
from shardproof.harness.torch_internals.backends import default_store, distributed_header, flight_record


def steps_text(steps: range) -> str:
    """The steps as requested: "2:4"."""
    return f"{steps.start}:{steps.stop}"


def step_ends(rank: int, program: Callable[[], object]) -> tuple[int, ...]:
    """Run the program as this rank. Returns, for each step, how many optimizer steps were over at its end."""
    attribution, ends, taken = Attribution(), list[int](), 0

    def emit(plain: tuple[Any, ...]) -> None:
        nonlocal taken
        seen, before = read_observation(plain), attribution.step
        attribution.feed(seen)
        # Steps without an optimizer step, known by changed parameters alone, do not count.
        if attribution.step > before and taken > (ends[-1] if ends else 0):
            ends.append(taken)
        taken += isinstance(seen, Stepped)

    with Watch(lambda _rank: emit) as watch, watch.on_rank(rank):
        program()
    return (*ends, taken)


@contextmanager
def watch_steps(
    steps: range, ends: Sequence[int], make: Callable[[], AbstractContextManager[object]]
) -> Iterator[None]:
    """Run the program in the body, inside of `make()` from the beginning of the first step to the end of the last.

    Raises MachineError if the program has fewer steps, by `ends`.
    """
    if steps.stop > len(ends):
        why = f"the program ends {len(ends)} of them, as its optimizers tell"
        raise MachineError(f"steps {steps_text(steps)} cannot be watched: {why}")
    opens = ends[steps.start - 1] if steps.start else 0
    # What follows the last optimizer step belongs to the last step.
    closes = ends[steps.stop - 1] if steps.stop < len(ends) else -1
    taken = 0
    with ExitStack() as entered:

        def count_step(*_: object) -> None:
            nonlocal taken
            taken += 1
            if taken == opens:
                entered.enter_context(make())
            elif taken == closes:
                entered.close()

        if not steps.start:
            entered.enter_context(make())
        hook = register_optimizer_step_post_hook(count_step)
        try:
            yield
        finally:
            hook.remove()


def terms_of(
    steps: range, case: CaseLike, terms: Iterable[TermLike], expected: Callable[[Any], Any] | None
) -> tuple[tuple[Term, ...] | None, str]:
    """The closed form of these steps, or None and the reason.

    A closed form counts the calls of a whole run. It can be cut into steps only if all steps are alike: the run must
    have each call `case.steps` times as often as the same case with one step.
    """
    try:
        short = tuple(expected(case.but(steps=1)) if expected is not None else ())
    except Exception as problem:  # a subject's own function; nobody may have called it with one step
        return None, f"the closed form of one step failed: {error_text(problem)}"
    every, summed = tuple(terms), list[Term]()
    for at in [dict(at) for at in dict.fromkeys(tuple(sorted(_at(term).items())) for term in (*every, *short))]:
        whole, one = (closed_form(term for term in some if _at(term) == at) for some in (every, short))
        if untold := _unequal_terms(whole, one, case.steps):
            return None, f"the closed form does not tell which step has what: {untold}"
        summed += [Term(**asdict(line), calls=n * len(steps), at=at) for line, n in one.complete.items()]
        summed += [term.times(len(steps)) for term in one.partial]
    return tuple(summed), ""


def _at(term: TermLike) -> dict[str, int]:
    return dict(getattr(term, "at", {}))


def _unequal_terms(whole: ClosedForm, single: ClosedForm, steps: int) -> str:
    """What differs between a run of all steps and `steps` times one step; "" for nothing."""
    for line in (*whole.complete, *single.complete):
        all_steps, one_step = whole.complete[line], single.complete[line]
        if all_steps != steps * one_step:
            where = f"{line.phase} {line.op} in {line.region or 'no module'}"
            return f"{all_steps} {where} in {steps} steps, and {one_step} in one"
    often = [term.times(steps) for term in single.partial]
    for mine, others in ((whole.partial, often), (often, whole.partial)):
        if odd := [term for term in mine if term not in others]:
            return f"{odd[0]} is not {steps} times what one step has"
    return ""


@contextmanager
def capture_range(device: torch.device) -> Iterator[None]:
    """nsys's capture range on a GPU: from cudaProfilerStart to Stop, all ranks at once."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.profiler.start()
    _together("started")
    try:
        yield
    finally:
        _together("ended")  # the first rank to stop ends the capture for all
        torch.cuda.profiler.stop()


def _together(what: str) -> None:
    """Wait until every rank is here, by the store: witnesses would see the call of a barrier."""
    store, ranks = default_store(), range(dist.get_world_size())
    store.set(f"{what}/{dist.get_rank()}", "")
    store.wait([f"{what}/{rank}" for rank in ranks])


class TorchTrace:
    """The torch profiler while it is entered, and torch's own log of the same calls (its Flight Recorder). Both are
    written later, since that takes seconds.
    """

    def __init__(self, *, cuda: bool, stacks: bool = False) -> None:
        self._cuda, self._stacks = cuda, stacks
        self._header: Mapping[str, Any] = {}
        self._entries: list[Mapping[str, Any]] = []

    def __enter__(self) -> Self:
        self._before = max((int(entry["record_id"]) for entry in flight_record()), default=-1)
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._cuda else [])]
        self._profile = profile(activities=kinds, record_shapes=True, with_stack=self._stacks)
        self._profile.start()
        return self

    def note_groups(self) -> None:
        """Record the groups that exist now: what the profiler wrote at its start lacks those made since."""
        self._header = distributed_header(self._profile) or self._header  # the world may be destroyed by now

    def __exit__(self, *_: object) -> None:
        self.note_groups()
        if self._header:
            self._profile.add_metadata_json("distributedInfo", json.dumps(self._header))
        self._profile.stop()
        self._entries = [entry for entry in flight_record() if int(entry["record_id"]) > self._before]

    def write(self, trace: Path, flight: Path) -> None:
        """Write the Chrome trace and the entries of the Flight Recorder."""
        self._profile.export_chrome_trace(str(trace))
        flight.write_text(json.dumps({"entries": self._entries}), encoding="utf-8")
