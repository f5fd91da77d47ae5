"""The samples and first parameter values of ranks and truth: if these differ, nothing that follows can agree.

The subject runs once more on its ranks, and the first values of its parameters are recorded. For a case in the
subject's own words, so are the numbers that `case.samples` gives to the ranks and to the truth. The samples of a step
are equal if both take every micro-batch of every data rank. The ranks of a tp group take the same samples, or share
them out. The run also records the gradients of the first step, as backward leaves them on each rank before any sum over
ranks, and their squares in every step.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from shardproof.harness.checking.measures.distance import as_float64
from shardproof.harness.checking.records import Evidence, Truth
from shardproof.harness.diagnosing.causes.proofs import last_bits
from shardproof.harness.errors import ShardproofError
from shardproof.harness.outcome.blocks import Block
from shardproof.harness.outcome.merging import Outcomes
from shardproof.harness.plain_case import PlainCase, Word
from shardproof.harness.protocols import Value
from shardproof.harness.recording.capturing.drawn_values import STARTED, FirstValues, first_blocks
from shardproof.harness.running.trials.trial import Trial
from shardproof.harness.running.truth.own import EXACT, OwnTruth
from shardproof.harness.subject import NamedSubject, OnRanks, call_subject
from shardproof.harness.verdicts.facts import Fact, state_fact

Asked = tuple[int, int, int, int, int]
"""Step, micro-batch, first and past-the-last number of its samples, and tp of the case that requested them."""
_ASKED = "asked "
"""The beginning of the names by which requests are returned in an outcome."""
_SQUARES = "squares of gradients"
_UNSUMMED = "gradient/"
"""The beginning of the names of gradients as backward leaves them, numbered by leaf like the first values."""
_TENSOR = "tp"
"""The axis whose ranks work on the same samples in every subject."""
_FEWEST = 4
"""The fewest elements of a part that is not taken to equal another part by chance."""
_FAR = 1e-2
"""First values that differ by more than this share of a parameter's norm are other values, and not rounded ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Watched(PlainCase):
    """A case that records the samples that it is asked for."""

    noted_samples: list[Asked]

    def samples(self, step: int, micro: int, dp_rank: int, batch: int) -> range:
        """The samples of the case, which are noted."""
        numbers = PlainCase.samples(self, step, micro, dp_rank, batch)
        self.noted_samples.append((step, micro, numbers.start, numbers.stop, int(self.axis_sizes[_TENSOR])))
        return numbers

    def but(self, **words: Word) -> "_Watched":
        """The case with other words, whose samples are noted too: a subject may go on with another layout."""
        return _watch_case(PlainCase.but(self, **words), self.noted_samples)


def _watch_case(case: PlainCase, noted: list[Asked]) -> _Watched:
    return _Watched(vocabulary=case.vocabulary, values=case.values, noted_samples=noted)


@dataclass(frozen=True, slots=True)
class _Asking:
    """The subject, with the samples that it takes on this rank and its first values in the outcome."""

    subject: NamedSubject

    def __getattr__(self, attribute: str) -> Any:
        """Take any other attribute from the subject."""
        return getattr(self.subject.call, attribute)  # session, per_rank

    def __call__(self, case: Any, device: torch.device) -> Mapping[str, Value]:
        """Run the subject. Returns a name for each request, and what the hooks of gradients recorded."""
        asked: list[Asked] = []
        gradients = _Gradients()
        watched = _watch_case(case, asked) if isinstance(case, PlainCase) else case
        with FirstValues(gradients.follow) as probe:
            outcome = call_subject(self.subject.call, watched, device)
        requests = {_ASKED + " ".join(map(str, one)): torch.ones(()) for one in asked}
        squares = torch.tensor(gradients.squares, dtype=torch.float64)
        return {**outcome, **probe.found, **requests, **gradients.first_step, _SQUARES: squares}


class _Gradients:
    """The gradients of this rank: what backward gave to each leaf in the first step, and sums of squares in every step.

    `squares` grows by one number whenever backward has added a gradient: the sum of squares over all leaves. The first
    step ends for a leaf when its value changes.
    """

    def __init__(self) -> None:
        self.squares: list[float] = []
        self._of: dict[int, float] = {}
        self._given: list[Tensor] = []

    @property
    def first_step(self) -> dict[str, Tensor]:
        """The gradients of the first step as names of an outcome."""
        return {f"{_UNSUMMED}{number}": given for number, given in enumerate(self._given)}

    def follow(self, leaf: Tensor) -> None:
        """Record the gradient of this leaf when backward computes it, and its square when it has been added."""
        number, start = len(self._given), _own_part(leaf).clone()
        self._given.append(torch.zeros_like(start))

        def add(gradient: Tensor) -> None:
            if not gradient.is_sparse and torch.equal(_own_part(leaf), start):
                self._given[number] = self._given[number] + _own_part(gradient)

        leaf.register_hook(add)
        leaf.register_post_accumulate_grad_hook(self._note_gradient)

    def _note_gradient(self, leaf: Tensor) -> None:
        gradient = leaf.grad
        if gradient is not None and not gradient.is_sparse:
            with torch.no_grad():
                self._of[id(leaf)] = float(as_float64(_own_part(gradient)).square().sum())
            self.squares.append(sum(self._of.values()))


def _own_part(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds, without its graph."""
    own: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return own.detach()


def with_beginnings(trial: Trial, evidence: Evidence, wrong: Collection[str]) -> Evidence:
    """The evidence with how samples and initial values of ranks differ from those of the truth, if they do."""
    own, case, samples = trial.reference.own, trial.case, None
    if not wrong or evidence.truth.unmergeable or not trial.has_time("located"):
        return evidence
    try:
        with trial.time_part("located"):
            ranks = trial.run(_Asking(trial.subject), case).outcomes
            if own is not None and isinstance(case, PlainCase):
                asked, truth = [_find_asked_samples(outcome) for outcome in ranks], _asked_by_truth(trial, own, case)
                samples = _apart(asked) or _difference(set().union(*asked), truth, case.micro)
    except ShardproofError:  # the subject may refuse a case that notes its samples
        return evidence
    squares = tuple(outcome[_SQUARES][0].local for outcome in ranks)
    start, given = _other_start(ranks, evidence.truth), tuple(map(_find_gradients, ranks))
    return evidence.with_found(other_samples=samples, other_start=start, unsummed=squares, before_sums=given)


def _find_gradients(outcome: Mapping[str, Sequence[Block]]) -> dict[str, Block]:
    """Parameter -> the gradient that backward gave to it on a rank, at the offsets of the rank's part of it."""
    numbers = {id(found[0].local): name.removeprefix(STARTED) for name, found in outcome.items() if found}
    parts = {name: (block, numbers.get(id(block.local), "")) for name, block in first_blocks(outcome).items()}
    given = {name: outcome.get(f"{_UNSUMMED}{number}", ()) for name, (_, number) in parts.items()}
    return {name: replace(parts[name][0], local=blocks[0].local) for name, blocks in given.items() if blocks}


def _find_asked_samples(outcome: Mapping[str, Sequence[Block]]) -> set[Asked]:
    numbers = (name.removeprefix(_ASKED).split() for name in outcome if name.startswith(_ASKED))
    return {(step, micro, start, stop, tp) for step, micro, start, stop, tp in (map(int, one) for one in numbers)}


def _asked_by_truth(trial: Trial, own: OwnTruth, case: PlainCase) -> set[Asked]:
    """The samples that the truth takes; none if the dense model makes its data in another way."""
    if isinstance(own.dense, OnRanks):
        run = trial.run(_Asking(own.dense.subject), own.dense.case_of(case).but(dtype=EXACT))
        return set().union(*map(_find_asked_samples, run.outcomes))
    noted: list[Asked] = []
    own(_watch_case(case, noted), torch.device(trial.device), given=trial.given or None)
    return set(noted)


def _apart(every: Sequence[set[Asked]]) -> Fact | None:
    """The first ranks of one tp group that take different samples in a step without sharing them out.

    Ranks of a group lie side by side, in the layout of the case that gave them their samples.
    """
    sizes = sorted({one[-1] for asked in every for one in asked})
    for tp, first in [(size, first) for size in sizes for first in range(0, len(every), size)]:
        ranks = [{one for one in asked if one[-1] == tp} for asked in every]
        for one, other in combinations(range(first, first + tp), 2):
            for step in sorted({step for step, *_ in ranks[one]} & {step for step, *_ in ranks[other]}):
                mine, theirs = _numbers(ranks[one], step), _numbers(ranks[other], step)
                often = Counter(number for asked in ranks for number in _numbers(asked, step))
                if mine != theirs and max(often.values()) > 1:
                    both = {"rank": one, "other": other, "axis": _TENSOR, "step": step}
                    return state_fact("group_samples", **both, mine=mine, theirs=theirs)
    return None


def _difference(ranks: set[Asked], truth: set[Asked], micro: int) -> Fact | None:
    """How the samples of ranks and truth differ in the first step in which they do; None if they are equal."""
    for step in sorted({step for step, *_ in ranks} & {step for step, *_ in truth}):
        mine, theirs = (_numbers(asked, step) for asked in (ranks, truth))
        if mine == theirs:
            continue
        known = {number for of_step, number, *_ in ranks if of_step == step}
        lacking = [number for number in range(micro) if number not in known]
        if lacking:
            return state_fact("samples_never_asked", micro=lacking, step=step, ranks=mine, truth=theirs)
        return state_fact("samples_differ", step=step, ranks=mine, truth=theirs)
    return None


def _numbers(asked: set[Asked], step: int) -> list[int]:
    """The numbers of the samples of a step, in their order."""
    return sorted({number for of_step, _, start, stop, _ in asked if of_step == step for number in range(start, stop)})


@dataclass(frozen=True, slots=True)
class _Begun:
    """The likely first value of a parameter on a rank, with the offsets of the part that the rank returns.

    `every` are the first values of all parameters of the rank.
    """

    rank: int
    name: str
    block: Block
    every: tuple[Tensor, ...]

    def lacks(self, initial: Mapping[str, Tensor]) -> bool:
        """Whether no parameter of the rank begins with the true values of this part."""
        true = self.block.part_of(initial[self.name])
        return not any(_equal(local, true) for local in self.every)


def _other_start(ranks: Outcomes, truth: Truth) -> Fact | None:
    """The first parameter that begins on a rank with the values of another part, or with other values."""
    found, initial = list(_find_first_values(ranks)), truth.initial
    known = [one for one in found if one.name in initial and initial[one.name].shape == one.block.global_shape]
    right = [(one.rank, one.name, one.block.part_of(initial[one.name])) for one in known]
    wrong = [  # values of another parameter do not count: then the wrong first value was recorded
        one
        for one in known
        if one.lacks(initial)
        and not any(
            rank == one.rank and name != one.name and _equal(one.block.local, true) for rank, name, true in right
        )
    ]
    for one in wrong:
        parts = (begun for begun in known if begun.name == one.name)
        other = next((p for p in parts if _equal(one.block.local, p.block.part_of(initial[one.name]))), None)
        if other:
            places = {"at": other.block.offsets, "returned": one.block.offsets}
            return state_fact("starts_as_other", rank=one.rank, name=one.name, other=other.rank, **places)
    for one in wrong:
        true = one.block.part_of(initial[one.name])
        if float((as_float64(one.block.local) - as_float64(true)).norm()) > _FAR * float(as_float64(true).norm()):
            return state_fact("starts_otherwise", rank=one.rank, name=one.name)
    return None


def _find_first_values(ranks: Outcomes) -> Iterator[_Begun]:
    """The first values of parameters of which a rank returns a single part."""
    for rank, outcome in enumerate(ranks):
        every = tuple(blocks[0].local for name, blocks in outcome.items() if name.startswith(STARTED))
        for name, block in first_blocks(outcome).items():
            if block.local.numel() >= _FEWEST:
                yield _Begun(rank, name, block, every)


def _equal(local: Tensor, true: Tensor) -> bool:
    """Whether these are the true numbers up to rounding of their dtype."""
    if local.shape != true.shape:
        return False
    share = max(last_bits(local), torch.finfo(local.dtype).eps)
    return float((as_float64(local) - as_float64(true)).abs().max()) <= share * float(as_float64(true).abs().max())
