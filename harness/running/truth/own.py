"""A subject's own truth: its dense model, or a subject that runs on ranks, such as the same subject on one rank.

The truth runs in float64. Control runs are the same function in the case's dtype, with every contraction cut into
partial sums. What it computes in a wider dtype nevertheless is moved by a random part of the case's rounding
(harness.running.truth.control_modes). A subject on ranks takes the same global batch: on one rank, the micro-batches of
all data ranks in sequence.

Masks of dropout come from the ranks: as `given` if the truth takes that parameter, else in the place of those that
torch draws. The ranks' choices of experts are passed on if the truth takes `routing`.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardproof.harness.checking.coverage import ROUTING
from shardproof.harness.checking.measures.kinds import NUMERIC_KINDS, kind_of
from shardproof.harness.checking.measures.measured import epsilon
from shardproof.harness.checking.measuring import INITIAL
from shardproof.harness.dense_model import in_own_words
from shardproof.harness.engines.engine import Engine
from shardproof.harness.errors import ProgramError, RequestError, name_ranks
from shardproof.harness.outcome.blocks import Block, localize
from shardproof.harness.outcome.merging import merge_outcomes
from shardproof.harness.protocols import CaseLike, Subject, Value, case_text, without_saving
from shardproof.harness.recording.capturing.drawn_values import (
    STARTED,
    Draw,
    DropoutProbe,
    FirstValues,
    WithFirstValues,
    WithMasks,
    first_values,
    taken_out,
)
from shardproof.harness.running.ranks.execution import execute
from shardproof.harness.running.truth.control_modes import emulated_dtypes, partial_sums
from shardproof.harness.running.truth.joint_masks import in_order
from shardproof.harness.subject import DenseFunction, NamedSubject, OnRanks, answer_question, session

EXACT = "float64"
_MASKED = ("forward", "activations")
"""Checks of tensors in which programs mask what they leave out with an infinity."""
_FINITE = {"loss"} | {kind for check, of in NUMERIC_KINDS.items() if check not in _MASKED for kind in of}
"""Kinds of tensors that hold an infinity only if training diverges."""
_Computed = tuple[Mapping[str, Tensor], tuple[Draw, ...]]
_SUPPOSED_WIDE: dict[tuple[str, str], bool] = {}
"""(subject, dtype) -> whether its last case multiplied in wider dtypes only: a first guess, which each case checks."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OwnTruth:
    """The function (case, device) -> outcome of a subject's own truth, or with `control` of one of its control runs.

    `dense` is the dense model, which runs inside `around()`, or a subject, which runs on `engine`. Four fields fill up,
    by the text of the case: `draws` are the masks of dropout that the truth drew itself, `initial` its parameters
    before the first step, `wide` whether its control runs multiply matrices only in dtypes wider than the case's,
    `unseen` whether they multiply none that a mode of torch sees.
    """

    subject: NamedSubject
    dense: DenseFunction | OnRanks
    engine: Engine
    timeout_s: float = 60.0
    control: bool = False
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    draws: dict[str, tuple[Draw, ...]] = field(default_factory=dict)
    wide: dict[str, bool] = field(default_factory=dict)
    unseen: dict[str, bool] = field(default_factory=dict)
    initial: dict[str, Mapping[str, Tensor]] = field(default_factory=dict)

    @property
    def takes_given(self) -> bool:
        """Whether the truth is a function (case, device, given=None) that puts what the ranks drew in its place."""
        return self._takes("given")

    @property
    def takes_routing(self) -> bool:
        """Whether the truth is a function (case, device, routing=None) that forces the experts that the ranks chose."""
        return self._takes("routing")

    def _takes(self, parameter: str) -> bool:
        function = self.dense.subject.call if isinstance(self.dense, OnRanks) else self.dense
        try:
            return parameter in inspect.signature(function).parameters
        except (TypeError, ValueError):  # a callable without a signature
            return False

    def _passed_on(self, given: Mapping[str, Tensor] | None) -> dict[str, Mapping[str, Tensor]]:
        """The keyword arguments by which the truth gets what the ranks drew and chose."""
        chosen = {name: tensor for name, tensor in (given or {}).items() if kind_of(name) == ROUTING}
        drawn = {name: tensor for name, tensor in (given or {}).items() if name not in chosen}
        words = {"given": (drawn, self.takes_given), "routing": (chosen, self.takes_routing)}
        return {word: tensors for word, (tensors, taken) in words.items() if taken and given is not None}

    def __call__(
        self, case: CaseLike, device: torch.device, *, parts: int = 0, given: Mapping[str, Tensor] | None = None
    ) -> Mapping[str, Tensor]:
        """Every tensor full, by name; `given` is what the ranks drew. Raises RequestError when the subject's own code
        fails, or what it returns is not finite.
        """
        if self.control:
            return self._run_control(case.but(**without_saving(case)), device, parts or 2, given)
        compute = self._on_ranks if isinstance(self.dense, OnRanks) else self._own
        tensors, draws = compute(case.but(dtype=EXACT, **without_saving(case)), device, PartialSums(), given)
        tensors, self.initial[case_text(case)] = first_values(tensors)
        if given is None:
            self.draws[case_text(case)] = draws
        wrong = [name for name, tensor in tensors.items() if not _is_sound(name, tensor)]
        if wrong:
            rule = f"the truth of {self.subject.name} is not finite in {wrong[0]}"
            raise RequestError(f"case {case_text(case)!r}: {rule}; legal: a case for which it is, such as a smaller lr")
        return tensors

    def _run_control(
        self, case: CaseLike, device: torch.device, parts: int, given: Mapping[str, Tensor] | None
    ) -> Mapping[str, Tensor]:
        """A control run. The first one of a case is made again if its products were in other dtypes than supposed.

        They are supposed to be in the dtypes of the subject's last case in this dtype.
        """
        compute = self._on_ranks if isinstance(self.dense, OnRanks) else self._own
        text, kind = case_text(case), (self.subject.name, case.dtype)
        wide = self.wide.get(text, _SUPPOSED_WIDE.get(kind, False))
        sums = PartialSums(parts=parts, units=emulated_dtypes(case.dtype, wide=wide), wide=wide)
        tensors, initial = first_values(compute(case, device, sums, given)[0])
        tensors |= {INITIAL + name: value for name, value in initial.items()}
        if text in self.wide:
            return tensors
        elsewhere = self.engine.remote and isinstance(self.dense, OnRanks)  # another process computes its products
        self.unseen[text] = not sums.products and not elsewhere
        self.wide[text] = _SUPPOSED_WIDE[kind] = bool(sums.products) and max(sums.products) < epsilon(case.dtype)
        return tensors if self.wide[text] is wide else self._run_control(case, device, parts, given)

    def _own(
        self, case: CaseLike, device: torch.device, sums: "PartialSums", given: Mapping[str, Tensor] | None
    ) -> _Computed:
        function: Any = self.dense
        dense = partial(function, **self._passed_on(given))

        def outcome() -> _Computed:
            with torch.random.fork_rng(devices=[]), session(self.subject.call), self.around(), sums.take_sums():
                torch.manual_seed(case.seed)
                with DropoutProbe(self._joint(given)) as probe, FirstValues() as first:
                    tensors = dense(case, device)
                merged = merge_outcomes([localize(tensors)]).tensors
                return {**merged, **first.found}, taken_out(probe.found)[1]

        return answer_question("truth", outcome)

    def _joint(self, given: Mapping[str, Tensor] | None) -> tuple[Tensor, ...] | None:
        """The masks that replace those that torch would draw; None if the truth draws its own or takes `given`."""
        masks = {name: mask for name, mask in (given or {}).items() if kind_of(name) == "mask"}
        return in_order(masks) if masks and not self.takes_given else None

    def _on_ranks(
        self, case: CaseLike, device: torch.device, sums: "PartialSums", given: Mapping[str, Tensor] | None
    ) -> _Computed:
        assert isinstance(self.dense, OnRanks)
        one, named = self.dense.case_of(case), self.dense.subject
        one = one if one.dtype == case.dtype else one.but(dtype=case.dtype)
        call: Subject = WithFirstValues(replace(named, call=self.with_masks(given), address=""))
        if sums.parts:
            call = InParts(replace(named, call=call, address=""), sums)
        ranks, legal = name_ranks(range(one.world_size)), "legal: --truth MODULE:OBJECT"
        try:
            run = execute(
                one, call, self.engine, text=case_text(one), record=False, device=str(device), timeout_s=self.timeout_s
            )
        except ProgramError as problem:
            rule = f"{named.name} does not finish on {ranks}, which is its truth"
            raise RequestError(f"case {case_text(one)!r}: {rule}: {problem.cause}; {legal}") from problem
        outcomes, draws = zip(*map(taken_out, run.outcomes), strict=True)
        if len(draws) > 1 and any(draws):
            rule = f"the truth {named.name} draws dropout on {ranks}, which are not those of the case"
            raise RequestError(f"case {case_text(one)!r}: {rule}; legal: a truth on one rank")
        several = len(outcomes) > 1
        merged = merge_outcomes([_placed(outcome) for outcome in outcomes] if several else outcomes)
        for flaw in (flaw for flaw in merged.flaws if several and not flaw.name.startswith(STARTED)):
            rule = f"the ranks of the truth {named.name} do not make one {flaw.name}: {flaw.message}"
            raise RequestError(f"case {case_text(one)!r}: {rule}; {legal}")
        return (merged.tensors if in_own_words(case) else _by_data_rank(merged.tensors, case)), draws[0]

    def with_masks(self, given: Mapping[str, Tensor] | None) -> WithMasks:
        """The subject that is the truth, with what the ranks of the case drew and chose."""
        subject = self.dense.subject if isinstance(self.dense, OnRanks) else self.subject
        return WithMasks(subject, self._joint(given), self._passed_on(given))


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialSums:
    """How a run takes its sums: in how many `parts` (0: uncut), and by which epsilons wide results move (`units`).

    If nothing is computed in the case's dtype (`wide`), numbers made of constants and draws alone are moved as well.
    `products` fills up with the epsilons of the dtypes in which matrices were multiplied.
    """

    parts: int = 0
    units: Mapping[torch.dtype, float] = field(default_factory=dict)
    wide: bool = False
    products: set[float] = field(default_factory=set)

    @contextmanager
    def take_sums(self) -> Iterator[None]:
        """Inside, sums of this thread are taken in this way."""
        if not self.parts:
            yield
            return
        with partial_sums(self.parts, self.units, inputs=self.wide) as mode:
            try:
                yield
            finally:
                self.products.update(mode.products)


def _by_data_rank(tensors: Mapping[str, Tensor], case: CaseLike) -> Mapping[str, Tensor]:
    """The tensors with the rows of logits in the decoder's order: all of the first data rank's, then the next one's."""
    dp: int = getattr(case, "dp", 1)

    def order_rows(rows: Tensor) -> Tensor:
        turned: Tensor = rows.unflatten(0, (case.micro, dp, -1)).transpose(0, 1).flatten(0, 2)
        return turned

    return {name: order_rows(rows) if name.startswith("logits/") else rows for name, rows in tensors.items()}


def _placed(outcome: Mapping[str, Sequence[Block]]) -> dict[str, Sequence[Block]]:
    """A rank's outcome. The first value of a parameter gets the place of the part that the rank returns of it."""
    own = {name: found for name, found in outcome.items() if not name.startswith(STARTED)}
    values = {name: found[0].local for name, found in outcome.items() if name.startswith(STARTED)}
    parts = {name: found[0] for name, found in own.items() if len(found) == 1}
    _, first = first_values({**values, **{name: block.local for name, block in parts.items()}})
    held = {name: parts.get(f"param/{name}") or parts[f"param_after/0/{name}"] for name in first}
    begun = {f"{STARTED}{name}": (replace(held[name], local=value),) for name, value in first.items()}
    return {**own, **begun}


@dataclass(frozen=True, slots=True)
class InParts:
    """The subject with its contractions cut into partial sums on every rank."""

    subject: NamedSubject
    sums: "PartialSums"

    def __getattr__(self, attribute: str) -> Any:
        """Any other attribute is the subject's."""
        return getattr(self.subject.call, attribute)  # session, per_rank

    def __call__(self, case: Any, device: torch.device) -> Mapping[str, Value]:
        """The subject's outcome in partial sums."""
        with self.sums.take_sums():
            return self.subject.call(case, device)


def _is_sound(name: str, tensor: Tensor) -> bool:
    """Whether a truth may have this tensor: without NaN, and with infinities only where programs mask with them."""
    if tensor.is_floating_point() and tensor.element_size() == 1:
        tensor = tensor.float()  # torch cannot ask 8-bit floats for NaN or infinity
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    return not bool((tensor.isnan() if kind_of(name) not in _FINITE else ~tensor.isfinite()).any())
