"""Wrong edits of any training program, planted from outside while its ranks run, so that no subject is changed.

An edit changes one number, row or tensor at one of the points that every such program has. These are an optimizer's
steps, backward passes, the results of collectives, the samples of a micro-batch. A run without an edit counts these
points on every rank, so that an edit is drawn among those that there are. Sizes of edits are relative.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from random import Random
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardproof.harness.protocols import CaseLike, Value
from shardproof.harness.running.truth.random_rounding import RandomRounding
from shardproof.harness.subject import NamedSubject

SIZES: Mapping[str, float] = {"float64": 1e-6, "float32": 1e-4, "bfloat16": 3e-2}
"""The relative size of an edit, by dtype."""
EVERY = -1
"""The rank of an edit that every rank makes."""
COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all",
    "all_to_all_single",
)
POINTS: Mapping[str, str] = {
    "a gradient times 1 + e before a step": "step",
    "a row of a gradient times 1 + e before a step": "step",
    "the largest element of a gradient times 1 + e before a step": "step",
    "the learning rate of a step times 1 + e": "step",
    "a step that leaves one parameter as it is": "step",
    "a step that an optimizer counts twice": "counted step",
    "an optimizer's state times 1 + e after a step": "kept step",
    "the largest element of a parameter times 1 + e after a step": "step",
    "the loss of a micro-batch times 1 + e": "backward",
    "the result of a collective times 1 + e": "collective",
    "a row of the result of a collective times 1 + e": "collective",
    "an all-reduce whose result is dropped": "all_reduce",
    "a micro-batch of other samples": "samples",
}
"""Edits -> the point at which they happen."""

LATER = ("counted step", "kept step")
"""Points at which an edit shows only in a later step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """An edit `what`, of POINTS, at point number `at` of its kind on `rank`, or on EVERY one; `size` is relative.

    `share`, in [0, 1), chooses parameter and row.
    """

    what: str
    rank: int
    at: int
    share: float
    size: float

    def __str__(self) -> str:
        where = "every rank" if self.rank == EVERY else f"rank {self.rank}"
        size = f" (e={self.size:g})" if "1 + e" in self.what else ""
        return f"{self.what}{size}, {POINTS[self.what]} {self.at}, {where}"


Counts = dict[str, int]
"""Kind of point -> how many of them a rank had."""


@dataclass(slots=True)
class _Rank:
    """The points that a rank has passed, tensors that a step must put back, and what the hook after a step must do."""

    edit: Edit | None
    frozen: bool
    passed: Counts = field(default_factory=dict)
    back: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    group: dict[str, Any] = field(default_factory=dict)

    def here(self, kind: str) -> bool:
        """Whether this point is that of the edit; counts it."""
        number = self.passed.get(kind, 0)
        self.passed[kind] = number + 1
        return self.edit is not None and POINTS[self.edit.what] == kind and self.edit.at == number


_NOW = threading.local()


def _rank() -> _Rank | None:
    """This thread's rank; None if no planted subject runs in it (the truth, other programs)."""
    found: _Rank | None = getattr(_NOW, "rank", None)
    return found


class Planted:
    """A subject with an edit, or with none. If `frozen`, no optimizer moves a parameter. `counts` fills up, by rank.

    `moves`: dtype -> an epsilon by a random part of which all numbers in it are moved; another `seed`, another part. A
    world of one rank gets no edit: it may be the truth of a subject that is compared with itself.
    """

    def __init__(
        self,
        subject: NamedSubject,
        edit: Edit | None = None,
        *,
        frozen: bool = False,
        moves: Mapping[torch.dtype, float] | None = None,
        seed: int = 0,
    ) -> None:
        self.subject, self.edit, self.frozen = subject, edit, frozen
        self.moves, self.seed = moves or {}, seed
        self.counts: dict[int, Counts] = {}

    def __getattr__(self, attribute: str) -> Any:
        """Take any other attribute from the subject."""
        return getattr(self.subject.call, attribute)

    def __call__(self, case: CaseLike, device: torch.device) -> Mapping[str, Value]:
        """Outcome of the subject on this rank, with its edit."""
        if case.world_size == 1:
            return self.subject.call(case, device)
        me = dist.get_rank()
        mine = self.edit if self.edit is not None and self.edit.rank in (me, EVERY) else None
        _NOW.rank = _Rank(edit=mine, frozen=self.frozen)
        try:
            with (
                RandomRounding(self.moves, seed=self.seed, inputs=False, leaving=True) if self.moves else nullcontext()
            ):
                return self.subject.call(_Numbered(case), device)
        finally:
            self.counts[me] = _NOW.rank.passed
            _NOW.rank = None

    @property
    def named(self) -> NamedSubject:
        """The planted subject under the name of the right one."""
        return NamedSubject(name=self.subject.name, call=self, truth=self.subject.truth)


class _Numbered:
    """A case as its subject sees it. An edit may replace samples by those of a step that is never run."""

    def __init__(self, case: CaseLike) -> None:
        self._case = case

    def __getattr__(self, name: str) -> Any:
        return getattr(self._case, name)

    def samples(self, step: int, micro: int, dp_rank: int, batch: int) -> range:
        rank = _rank()
        other = rank is not None and rank.here("samples")
        found: range = self._case.samples(step + 17 * other, micro, dp_rank, batch)  # type: ignore[attr-defined]
        return found


@contextmanager
def plant_edits() -> Iterator[None]:
    """A context in which planted subjects make their edits; programs of other threads are left alone."""
    before = register_optimizer_step_pre_hook(_before_step)
    behind = register_optimizer_step_post_hook(_behind_step)
    stands_in = {name: _edit_function(name, getattr(dist, name)) for name in COLLECTIVES}
    try:
        with patch.dict(vars(dist), stands_in), patch.object(Tensor, "backward", _backward(Tensor.backward)):
            yield
    finally:
        before.remove()
        behind.remove()


def drawn_edit(counts: Mapping[int, Counts], dtype: str, chosen: Random) -> Edit:
    """An edit among the points that a run of the subject had. Raises ValueError where it had none."""
    for what in chosen.sample(list(POINTS), len(POINTS)):
        kind = POINTS[what]
        ranks = [rank for rank, passed in counts.items() if passed.get(kind)]
        everywhere = len(ranks) == len(counts) and len({passed[kind] for passed in counts.values()}) == 1
        if ranks:
            rank = EVERY if everywhere and chosen.random() < 0.6 else chosen.choice(sorted(ranks))
            many = counts[ranks[0] if rank == EVERY else rank][kind]
            last = kind in LATER and many > 1
            at = chosen.randrange(many - last)
            return Edit(what=what, rank=rank, at=at, share=chosen.random(), size=SIZES[dtype])
    raise ValueError("the subject has no point at which an edit could be planted; legal: one with an optimizer")


def _stepped_parameters(optimizer: Optimizer) -> list[Tensor]:
    """Parameters that this step moves."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def _choose_part(of: Sequence[Tensor], share: float) -> Tensor:
    return of[int(share * len(of))]


def _times(tensor: Tensor, edit: Edit) -> None:
    """Multiply the tensor, a row or its largest element by 1 + size, in place."""
    with torch.no_grad():
        if "row" in edit.what and tensor.dim():
            tensor = tensor[int(edit.share * 7919) % len(tensor)]
        elif "largest" in edit.what:
            flat = tensor.view(-1) if tensor.is_contiguous() else tensor.diagonal()
            tensor = flat[flat.abs().argmax()]
        tensor.mul_(1 + edit.size)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    rank = _rank()
    if rank is None:
        return
    moved = _stepped_parameters(optimizer)
    rank.back = [(p, p.detach().clone()) for p in moved] if rank.frozen else []
    if not rank.here("step") or not moved or rank.edit is None:
        return
    edit, one = rank.edit, _choose_part(moved, rank.edit.share)
    if "gradient" in edit.what and one.grad is not None:
        one.grad = one.grad.to_dense() if one.grad.is_sparse else one.grad
        _times(one.grad, edit)
    elif "learning rate" in edit.what:
        rank.group = dict.fromkeys(map(str, range(len(optimizer.param_groups))), 1 + edit.size)
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * (1 + edit.size)
    elif "leaves one parameter" in edit.what:
        rank.back = [(one, one.detach().clone())]
    elif "element of a parameter" in edit.what:
        rank.group = {"then": one}


def _behind_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    rank = _rank()
    if rank is None:
        return
    with torch.no_grad():
        for tensor, before in rank.back:
            tensor.copy_(before)
    if "then" in rank.group and rank.edit is not None:
        _times(rank.group["then"].detach(), rank.edit)
    elif rank.group:
        for number, group in enumerate(optimizer.param_groups):
            group["lr"] = group["lr"] / rank.group[str(number)]
    rank.back, rank.group = [], {}
    states = [optimizer.state[p] for p in _stepped_parameters(optimizer) if p in optimizer.state]
    counted = [state["step"] for state in states if isinstance(state.get("step"), Tensor)]
    kept = [
        value for state in states for name, value in sorted(state.items()) if isinstance(value, Tensor) and value.dim()
    ]
    if counted and rank.here("counted step") and rank.edit is not None:
        _choose_part(counted, rank.edit.share).add_(1)
    if kept and rank.here("kept step") and rank.edit is not None:
        _choose_part(kept, rank.edit.share).mul_(1 + rank.edit.size)


def _backward(real: Callable[..., None]) -> Callable[..., None]:
    def backward(self: Tensor, *args: Any, **kwargs: Any) -> None:
        rank = _rank()
        if rank is not None and rank.here("backward") and rank.edit is not None:
            if args and isinstance(args[0], Tensor):  # a stage of a pipeline: the gradient that it was sent
                args = (args[0] * (1 + rank.edit.size), *args[1:])
            else:
                self = self * (1 + rank.edit.size)
        real(self, *args, **kwargs)

    return backward


def _edit_function(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def collective(*args: Any, **kwargs: Any) -> Any:
        rank = _rank()
        if rank is None or not args:
            return real(*args, **kwargs)
        given = args[0] if isinstance(args[0], list) else [args[0]]
        floating = all(isinstance(one, Tensor) and (one.is_floating_point() or one.is_complex()) for one in given)
        drops = floating and name == "all_reduce" and rank.here("all_reduce")
        multiplies = floating and rank.here("collective")
        before = [one.clone() for one in given] if drops else []
        work = real(*args, **kwargs)
        if rank.edit is not None and (drops or multiplies):
            if work is not None:
                work.wait()
            for one, old in zip(given, before, strict=False):
                one.detach().copy_(old)
            if multiplies:
                _times(_choose_part(given, rank.edit.share).detach(), rank.edit)
        return work

    return collective
