"""The first module that computes something else than the truth, found without any declared layout.

Modules of truth and ranks are matched by name: by equal paths, or by the longest common end ("model.layers.0.mlp" is
"layers.0.mlp"). Modules without a counterpart are left out. A module agrees if its tensors are the truth's under some
layout (`placing.alignments`). In forward, the search finds the first module whose output agrees under no layout. If its
input agrees, that module is the place, else the code of the module around it. In backward, it finds the last module
whose output has a gradient that agrees under no layout; the place is the module that uses this output. Partial sums
before the first wrong module are the place themselves if nothing adds them up. A module is left out if a module around
it agrees, since then nothing went wrong inside.

This is a place and never a verdict, since it is looked for only if checks have failed.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from shardproof.harness.checking.measures.many_tensors import kind_rms
from shardproof.harness.checking.records import Located
from shardproof.harness.diagnosing.placing.alignments import (
    AGREES,
    DIFFERS,
    UNKNOWN,
    Factors,
    Fit,
    TrueTensor,
    fit_parts,
)
from shardproof.harness.diagnosing.placing.counterparts import (
    as_declared,
    as_plain_tensors,
    same_modules,
    stages_of_ranks,
)
from shardproof.harness.ledger import Event
from shardproof.harness.protocols import Axes
from shardproof.harness.recording.capturing.module_calls import ModuleCalls, TensorCopy

_SUMS = ("all_reduce", "reduce_scatter", "reduce")
_NO_FIT = Fit(state=UNKNOWN)
_Tensors = Callable[[ModuleCalls], Mapping[str, Sequence[TensorCopy]]]
"""A function from the calls of a program's modules to some of their tensors, by path."""
_OUTPUTS, _GRADIENTS, _INPUT_GRADIENTS = map(attrgetter, ("outputs", "gradients", "input_gradients"))


def _first_inputs(calls: ModuleCalls) -> Mapping[str, Sequence[TensorCopy]]:
    return {path: [call[0] for call in given if call] for path, given in calls.inputs.items()}


def _tell_unlike(what: str, module: str) -> str:
    """That this tensor of a module agrees with the truth under no layout."""
    return f"no way of joining the ranks' parts of the {what} of {module} gives the dense model's"


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """The modules of all ranks and of the truth. `controls` are runs of the truth in the case's dtype. With
    `first_call` the truth has the tensors of its first call alone.
    """

    ranks: Sequence[ModuleCalls]
    truth: ModuleCalls
    axes: Axes
    dtype: str
    controls: Sequence[ModuleCalls] = ()
    first_call: bool = False
    events: Collection[Event] = field(default=())


def locate_wrong_module(watched: Watched, *, forward: bool, backward: bool) -> Located | None:
    """The first wrong module of forward if `forward`, else of backward if `backward`; None if all agree."""
    search = _Search(watched)
    return search.forward() if forward else search.backward() if backward else None


class _Search:
    """A search through the modules of one run."""

    def __init__(self, watched: Watched) -> None:
        self._of = watched
        self._factors: Factors | None = None
        mine = dict.fromkeys(path for rank in watched.ranks for path in rank.outputs)
        self._names = same_modules(list(mine), list(watched.truth.outputs))
        self._order = [path for path in watched.truth.outputs if path in self._names]
        self._plain = {path for path, own in self._names.items() if all(own in rank.plain for rank in watched.ranks)}
        self._linear = {path for path, own in self._names.items() if any(own in rank.linear for rank in watched.ranks)}

    def forward(self) -> Located | None:
        """The place of the first output that agrees under no layout."""
        targets = self._targets(_OUTPUTS)
        fits = {p: self._fit(p, targets[p], _OUTPUTS) if p in targets else _NO_FIT for p in self._order}
        wrong = self._first_wrong(self._order, fits, "forward")
        if parts := self._left_in_parts(self._order, fits, "forward", wrong):
            axis = fits[parts[0]].summed
            inner = next((path for path in parts if path not in self._plain), self._around(parts[-1]))
            words = f"its output is a partial sum on each rank of {axis}, and nothing sums it"
            return Located(phase="forward", module=self._own(inner), words=words, summed=axis)
        if wrong is None:
            return None
        module, given = wrong, self._fit_inputs(wrong)
        while module and self._fit_inputs(module).state == DIFFERS:
            module = self._around(module)
        shown, words = fits[wrong].shown, _tell_unlike("output", self._own(wrong))
        if module != wrong:
            shown = given.shown
            words = _tell_unlike("input", self._own(wrong))
        if not module and wrong == self._order[0]:  # it comes first, so the data are wrong
            module, words = wrong, _tell_unlike("input", self._own(wrong))
        return Located(phase="forward", module=self._own(module), words=words, shown=shown)

    def backward(self) -> Located | None:
        """The place of the first gradient of an output, in the order of backward, that agrees under no layout."""
        order = list(reversed(self._order))
        fits = self._gradients(order)
        wrong = self._first_wrong(order, fits, "backward")
        if parts := self._left_in_parts(order, fits, "backward", wrong):
            first, axis = parts[0], fits[parts[0]].summed
            given = f"the gradient entering {self._own(first)}'s output"
            words = f"{given} is a partial sum on each rank of {axis}, and nothing sums it"
            return Located(phase="backward", module=self._own(self._user(first)), words=words, summed=axis)
        if wrong is None:
            return None
        words = _tell_unlike("gradient of the output", self._own(wrong))
        module = self._own(self._user(wrong))
        return Located(phase="backward", module=module, words=words, shown=fits[wrong].shown)

    def _own(self, path: str) -> str:
        """The path of the module on the ranks."""
        return self._names.get(path, path)

    def _after(self, path: str, fits: Mapping[str, Fit], phase: str) -> Iterator[Fit]:
        """What follows a module's tensor: in forward the outputs of the modules around it, inner modules first.

        In backward, the gradient that leaves the module if its own differs, and those that leave the modules around it.
        """
        if phase == "backward" and fits[path].state == DIFFERS:
            yield self._given_back(path)
        for out in self._outside(path):
            if phase == "forward":
                yield fits[out]
            else:
                inside = next(number for number, other in enumerate(self._order) if other.startswith(f"{out}."))
                yield fits[self._order[inside - 1]] if inside else _NO_FIT

    def _first_wrong(self, order: Sequence[str], fits: Mapping[str, Fit], phase: str) -> str | None:
        """The first of these that differs. If what follows agrees, the module has another layout and is not wrong."""
        for path in order:
            if fits[path].state != DIFFERS or any(fit.state == AGREES for fit in self._after(path, fits, phase)):
                continue
            if phase == "forward" or not self._lies_otherwise(path):
                return path
        return None

    def _lies_otherwise(self, path: str) -> bool:
        """Whether an output differs although forward is right: in an unknown layout its gradient shows nothing either.

        A table of positions, for example, returns one row for all samples, which looks like rows of samples.
        """
        target = self._targets(_OUTPUTS).get(path)
        return target is not None and self._fit(path, target, _OUTPUTS).state == DIFFERS

    def _left_in_parts(self, order: Sequence[str], fits: Mapping[str, Fit], phase: str, wrong: str | None) -> list[str]:
        """The modules in a row, before the first wrong one, whose tensors are partial sums that nothing adds up.

        If no module is wrong, these must be the last of all modules, and the loss may add up their sums.
        """
        parts: list[str] = []
        for path in reversed(order[: order.index(wrong)] if wrong else order):
            whole = (after.state == AGREES and not after.summed for after in self._after(path, fits, phase))
            if fits[path].summed and not any(whole):
                parts.insert(0, path)
            elif (parts or wrong is None) and fits[path].state != UNKNOWN:
                break
        if not parts:
            return []
        last, phases = parts[-1], {phase} if wrong else {phase, "loss"}
        axis, around = fits[last].summed, list(self._outside(last)) or [""]
        regions = {self._names.get(path, path) for path in (*parts, *around, wrong or "")}
        added = any(
            event.op in _SUMS and event.phase in phases and event.axis == axis and event.region in regions
            for event in self._of.events
        )
        return [] if added and not (wrong and self._stay_apart(parts, fits, wrong, phase)) else parts

    def _stay_apart(self, parts: Sequence[str], fits: Mapping[str, Fit], wrong: str, phase: str) -> bool:
        """Whether the wrong tensor after these partial sums is each rank's own part plus a tensor that bypasses them.

        Every rank has the bypassing tensor whole, like a residual stream, so the sum over ranks has it once per rank.
        """
        of, order = (_first_inputs, self._order) if phase == "forward" else (_GRADIENTS, [*reversed(self._order)])
        target, around = self._targets(of).get(wrong), self._targets(_OUTPUTS if phase == "forward" else _GRADIENTS)
        before = order[: order.index(parts[0])] if target else []
        whole = (around[path] for path in reversed(before) if fits[path].state == AGREES and not fits[path].summed)
        more = len(self._of.axes[fits[parts[-1]].summed][0]) - 1
        sums = (target.plus(more, one) for one in whole if target)
        factors = self._factors if phase == "backward" else None
        found = (self._fit(wrong, one, of, factors=factors) for one in sums if one)
        return any(fit.summed == fits[parts[-1]].summed for fit in found)

    def _outside(self, path: str) -> Iterator[str]:
        """The modules around this one that have a counterpart, inner modules first."""
        while path := path.rpartition(".")[0]:
            if path in self._names:
                yield path

    def _around(self, path: str) -> str:
        return next(self._outside(path), "")

    def _user(self, module: str) -> str:
        """The module whose backward computes the gradient of the output of `module`.

        It is the next module in the same parent, or else the next one at all. Code between two blocks (a residual sum),
        or between two linear maps, belongs to their parent. The input of a block that begins with a norm is used by the
        block, which needs it beside the norm too.
        """
        order = list(self._of.truth.outputs)
        later = order[order.index(module) + 1 :]
        if not later:
            return module
        following, around = later[0], self._around(module)
        if following not in self._names:
            return self._around(following)
        if self._around(following) == around:
            between = any(path.startswith(f"{module}.") for path in self._order)
            if {module, following} <= self._linear:
                given_back = self._given_back(following).state
                if given_back == AGREES:
                    return around
                between = given_back != DIFFERS
            return around if around and between else following
        if following in self._linear:
            return following
        return next((out for out in self._outside(following) if self._around(out) == around), following)

    def _gradients(self, order: Sequence[str]) -> dict[str, Fit]:
        """The fits of gradients.

        The factors of the first gradient that agrees up to one factor for each rank and call show how the subject
        scales its loss. That scale is no fault of a module: a wrong loss is judged by itself.
        """
        targets, factors = self._targets(_GRADIENTS), self._factors
        fits = dict.fromkeys(order, _NO_FIT)
        for path in order:
            if path in targets:
                scaled = factors is None
                fits[path] = self._fit(path, targets[path], _GRADIENTS, scaled=scaled, factors=factors)
                if scaled and fits[path].state != UNKNOWN:
                    self._factors = factors = fits[path].factors or {}
        return fits

    def _given_back(self, path: str) -> Fit:
        """Whether the gradient of a module's input agrees, over all uses of that tensor."""
        target = self._targets(_INPUT_GRADIENTS).get(path)
        return self._fit(path, target, _INPUT_GRADIENTS, factors=self._factors) if target else _NO_FIT

    def _fit_inputs(self, path: str) -> Fit:
        """Whether the input of a module agrees: DIFFERS if one of its tensors does not."""
        own, state = self._names[path], UNKNOWN
        mine = [rank.inputs[own] for rank in self._of.ranks if own in rank.inputs]
        counts = {len(call) for calls in (self._of.truth.inputs.get(path, ()), *mine) for call in calls}
        # If a module does not get as many tensors as in the truth, only the first one, the hidden states, is compared.
        for number in range(max(counts, default=0) if len(counts) == 1 else min(1, min(counts, default=0))):

            def of(calls: ModuleCalls, number: int = number) -> dict[str, list[TensorCopy]]:
                return {
                    name: [call[number] for call in given if len(call) > number] for name, given in calls.inputs.items()
                }

            target = self._targets(of).get(path)
            fitted = self._fit(path, target, of) if target else _NO_FIT
            if fitted.state == DIFFERS:
                return fitted
            state = AGREES if AGREES in (state, fitted.state) else UNKNOWN
        return Fit(state=state)

    def _targets(self, of: _Tensors) -> dict[str, TrueTensor]:
        """Path of the truth -> its tensors, for modules whose calls could all be read."""
        calls_of_all = (self._of.truth, *self._of.controls)
        runs = [{path: as_plain_tensors(tensors) for path, tensors in of(calls).items()} for calls in calls_of_all]
        truth = {path: calls for path, calls in runs[0].items() if calls}
        rms = kind_rms(
            {f"it/{path}/{number}": call for path, calls in truth.items() for number, call in enumerate(calls)}
        )
        return {
            path: TrueTensor(
                calls=tuple(calls),
                dtype=self._of.dtype,
                controls=tuple(tuple(run[path]) for run in runs[1:] if run.get(path)),
                kind=rms.get("it", 0.0),
            )
            for path, calls in truth.items()
        }

    def _fit(
        self, path: str, target: TrueTensor, of: _Tensors, *, scaled: bool = False, factors: Factors | None = None
    ) -> Fit:
        own = self._names[path]
        by_rank = {rank: list(of(calls)[own]) for rank, calls in enumerate(self._of.ranks) if of(calls).get(own)}
        if self._of.first_call:
            by_rank = {rank: calls[:1] for rank, calls in by_rank.items()}
        if any(not one.blocks for calls in by_rank.values() for one in calls):
            return _NO_FIT
        parts, axes = as_declared(by_rank), self._of.axes
        if parts is None:
            return Fit(state=DIFFERS)
        fitted = fit_parts(parts, target, axes, scaled=scaled, factors=factors)
        for stage in stages_of_ranks(parts, axes) if fitted.state == DIFFERS else ():
            # Each stage of a pipeline may number its layers from 0, so the truth's layer is on one of the stages.
            of_stage = fit_parts(stage, target, axes, scaled=scaled, factors=factors)
            fitted = of_stage if of_stage.state == AGREES else fitted
        return fitted
