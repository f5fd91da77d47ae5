"""Runs for the check `documents`: one step with some documents changed, then with the gradients of some alone.

For any two documents, one run chooses the first and not the second: each document is chosen in half of the runs, and no
two documents in the same runs. So 6 documents need 4 runs forward and 4 backward, and 70 need 8. When a run shows a
difference, its documents are halved until one is left.

Gradients are compared with those of a run in which every place that states documents stops all gradients. What does not
go through such a place, like the gradient of a balance loss over all tokens, is the same in both runs.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, count
from math import comb
from typing import Any

import torch
from torch import Tensor

from shardproof.harness.checking.records import DocumentLeak, Documents
from shardproof.harness.errors import MachineError, ProgramError
from shardproof.harness.outcome.merging import Outcomes
from shardproof.harness.protocols import CaseLike, Value, without_saving
from shardproof.harness.recording.documents import DocumentProbe
from shardproof.harness.running.trials.trial import Trial
from shardproof.harness.subject import NamedSubject, call_subject, refusal

_NOBODY = frozenset[int]()
_ROUNDING = 16.0
"""A difference of at most this many epsilons of the largest value may be rounding of products with other rows."""
_KINDS = {"forward": "values", "backward": "gradients"}


@dataclass(frozen=True, slots=True)
class _Probed:
    """A subject whose outcome is what passed the places at which it states documents."""

    subject: NamedSubject
    changed: frozenset[int] = _NOBODY
    let_through: frozenset[int] = _NOBODY

    def __getattr__(self, attribute: str) -> Any:
        """Take any other attribute from the subject."""
        return getattr(self.subject.call, attribute)  # session, per_rank

    def __call__(self, case: Any, device: torch.device) -> Mapping[str, Value]:
        """Run the subject with its statements probed."""
        with DocumentProbe(self.changed, self.let_through).enter_thread() as probe:
            call_subject(self.subject.call, case, device)
        return dict(probe.found)


def run_documents(trial: Trial) -> Documents:
    """Whether documents of the first step influence each other."""
    case = _first_step(trial)
    try:
        with trial.time_part("documents"):
            return _tell_apart(trial, case)
    except (ProgramError, MachineError) as error:
        return Documents(problem=f"a run with some of them changed did not end ({error.cause})")


def _first_step(trial: Trial) -> CaseLike:
    """The case with one step, or unchanged if the subject refuses one step."""
    case: CaseLike = trial.case.but(**without_saving(trial.case))
    one = case.but(steps=1)
    return case if refusal(one, trial.subject) else one


def _tell_apart(trial: Trial, case: CaseLike) -> Documents:
    base = trial.run(_Probed(trial.subject), case).outcomes
    numbers = sorted({int(each) for _, _, numbers in _places(base) for each in numbers.unique() if each >= 0})
    doubted = None
    for phase in _KINDS:
        for chosen in _separating_sets(numbers):
            leak = _leak(trial, case, base, chosen, phase)
            if leak is not None and not leak.rounding:
                return Documents(count=len(numbers), leak=_with_one(trial, case, base, chosen, leak))
            doubted = doubted or leak
    return Documents(count=len(numbers), leak=doubted)


def _separating_sets(numbers: Sequence[int]) -> Iterator[frozenset[int]]:
    """Sets such that, for any two numbers, one of them holds the first and not the second."""
    size = next(size for size in count(1) if comb(size, size // 2) >= len(numbers))
    codes = dict(zip(numbers, combinations(range(size), size // 2), strict=False))
    for place in range(size):
        if chosen := frozenset(number for number, code in codes.items() if place in code):
            yield chosen


def _places(outcomes: Outcomes) -> Iterator[tuple[int, str, Tensor]]:
    """Rank, name and numbers of every place at which documents are stated, in the order of calls, rank by rank."""
    for rank, outcome in enumerate(outcomes):
        for name, (block, *_) in outcome.items():
            if name.split()[1] == "numbers":
                yield rank, name, block.local


def _leak(trial: Trial, case: CaseLike, base: Outcomes, chosen: frozenset[int], phase: str) -> DocumentLeak | None:
    """The first place where these documents change others' tokens; a change within rounding counts if no other does."""
    how = {"changed" if phase == "forward" else "let_through": chosen}
    other = trial.run(_Probed(trial.subject, **how), case).outcomes
    found = [*_differences(base, other, chosen, phase)]
    ahead = [leak for leak in found if not leak.rounding] or found
    backward = -1 if phase == "backward" else 1  # gradients come to the last place first
    return min(ahead, key=lambda leak: (backward * leak.call, leak.rank), default=None)


def _differences(base: Outcomes, other: Outcomes, chosen: frozenset[int], phase: str) -> Iterator[DocumentLeak]:
    """The places at which tokens of documents outside `chosen` differ between the two runs."""
    kind, come_from = _KINDS[phase], {"forward": -1, "backward": 1}[phase]
    lines = {(rank, int(name.split()[0])): name.split(maxsplit=2)[2] for rank, name, _ in _places(base)}
    for rank, name, numbers in _places(base):
        known, call = name.replace("numbers", kind, 1), int(name.split()[0])
        if known not in base[rank] or known not in other[rank]:
            continue
        before, after = (outcomes[rank][known][0].local for outcomes in (base, other))
        theirs = torch.isin(numbers, torch.tensor(sorted(chosen))) | (numbers < 0)
        gaps = (after - before).abs().double().reshape(numbers.numel(), -1).amax(-1).masked_fill(theirs.flatten(), 0)
        if not bool(gaps.any()):
            continue
        token, largest = int(gaps.argmax()), max(float(one.abs().max()) for one in (before, after))
        yield DocumentLeak(
            phase=phase,
            of=min(chosen),
            other=int(numbers.flatten()[token]),
            rank=rank,
            call=call,
            token=token,
            gap=float(gaps[token]),
            place=lines[rank, call],
            before=lines.get((rank, call + come_from), ""),
            rounding=float(gaps[token]) <= _ROUNDING * torch.finfo(before.dtype).eps * largest,
        )


def _with_one(trial: Trial, case: CaseLike, base: Outcomes, chosen: frozenset[int], leak: DocumentLeak) -> DocumentLeak:
    """The leak from one document alone, found by bisection."""
    suspects = sorted(chosen, key=lambda number: abs(number - leak.other))  # neighbours first
    while len(suspects) > 1:
        half = suspects[: len(suspects) // 2]
        part = _leak(trial, case, base, frozenset(half), leak.phase)
        if part is not None and not part.rounding:
            suspects, leak = half, part
        else:
            suspects = suspects[len(suspects) // 2 :]
    alone = _leak(trial, case, base, frozenset(suspects), leak.phase)
    return alone if alone is not None and not alone.rounding else leak
