"""What `shardproof predict` compares: the cases that a text stands for, the bytes of each mode, and what would fit.

A text without a mode (or with mode=all) stands for every mode that the subject claims; with a world size, for the
meshes of that many ranks too. A case that cannot be is kept with the rule that it breaks. Where the text does not say
them, parameters are bfloat16 and AdamW trains in mixed precision.

What would make a case fit into the device's memory are legal changes of its words, each forecast, the smallest kept:
recompute=full; more ranks to a layer (tp, with fewer data ranks); weights split too (mode=isp, wp). Of each kind the
strongest legal change comes first: where that needs too much, no weaker one fits, and where it fits, the weakest that
still does is sought. Sizes are bytes of a rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import pandas as pd

from harness.errors import RequestError
from harness.ledger import PASSES, wire_bytes
from harness.mesh_axes import SAME_SAMPLES
from harness.plain_case import PlainCase
from harness.predicting.figures import Forecast, States, mixed_adamw
from harness.protocols import CaseLike, Subject
from harness.subject import case_of, claimed, named, named_axes, refusal, stated, vocabulary
from harness.terms import EventKey, closed_forms

BATCHES = (1, 4, 16, 64)
"""Sequences of a micro-batch at which the bytes of a mode are counted: bytes are a straight line in the tokens."""
DTYPE = "dtype=bfloat16"
"""What a text without `dtype=` is predicted in."""
_WIDEST_SHARDS = (8, 64)
"""Weight-parallel sizes that a search tries beside wp=tp: a node of eight, and eight of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A case to predict, or the reason why it cannot be; `words` are those in which the candidates of a text differ.

    `states`: what AdamW keeps of a parameter; None when the text says `optimizer=`, which is then the program's own.
    """

    text: str
    words: str
    case: CaseLike | None
    reason: str = ""
    states: States | None = None


def candidates(text: str, subject: Subject, *, world: int | None = None, inner: int = 8) -> list[Candidate]:
    """The cases that a text stands for. `inner`: the most ranks of the axis tp in a search.

    Raises RequestError when the text names one case and that cannot be, when none of several can, and for a world that
    the case's stages and context ranks do not divide.
    """
    given = named(subject)
    if vocabulary(given) is not None:
        return [candidate(text, text, subject)]
    words = text.split()
    kept = [word for word in words if word != "mode=all"]
    said = [word for word in kept if word.startswith("mode=")]
    modes = said[-1:] or [f"mode={mode}" for mode in claimed(named(subject)) or ()]
    if not modes:
        raise RequestError(f"case {text!r}: names no mode, and the subject claims none; legal: mode=tp")
    if world is not None and world < 1:
        raise RequestError(f"world={world}: must be at least 1; legal: --world 8")
    rest = [word for word in kept if not word.startswith("mode=")]
    rest += [] if _says(text, "dtype") else [DTYPE]
    if world is not None:
        rest = [word for word in rest if word.partition("=")[0] not in ("tp", "dp", "wp")]
        world = _left(world, rest)
    found = []
    for mode in modes:
        for mesh in [""] if world is None else _meshes(world, inner, sharded=mode == "mode=isp"):
            own = f"{mode} {mesh}".strip()
            found.append(candidate(" ".join([*rest, own]), own, subject))
    if not any(one.case for one in found):
        raise RequestError(f"case {text!r}: {found[0].reason}")
    return found


def _left(world: int, words: Iterable[str]) -> int:
    """Ranks of a world that are left to tp and dp by the stages and context ranks of these words, the last of each.

    Raises RequestError when the world is no multiple of them.
    """
    said = {key: int(value) for key, value in stated_words(" ".join(words)).items() if value.isdecimal()}
    for axis in reversed(SAME_SAMPLES):
        if said.get(axis, 1) > 1:
            if world % said[axis]:
                rule = f"must be a multiple of {axis}={said[axis]}"
                raise RequestError(f"world={world}: {rule}; legal: --world {-(-world // said[axis]) * said[axis]}")
            world //= said[axis]
    return world


def _meshes(world: int, inner: int, *, sharded: bool) -> Iterator[str]:
    for tp in range(1, min(world, inner) + 1):
        if world % tp == 0:
            sizes = dict.fromkeys((tp, *_WIDEST_SHARDS)) if sharded else [0]
            for wp in sizes:
                if not wp or (world % wp == 0 and wp <= world):
                    yield f"tp={tp} dp={world // tp}" + (f" wp={wp}" if wp else "")


def stated_words(text: str) -> dict[str, str]:
    """Key -> value of every word of a text, the last where one is there twice."""
    return {key: value for key, _, value in (word.partition("=") for word in text.split())}


def _says(text: str, key: str) -> bool:
    return any(word.startswith(f"{key}=") for word in text.split())


def candidate(text: str, words: str, subject: Subject) -> Candidate:
    """The case of this text, or the rule that it breaks."""
    try:
        case = case_of(text, named(subject))
    except RequestError as problem:
        return Candidate(text=text, words=words, case=None, reason=str(problem.__cause__))
    reason = refusal(case, named(subject))
    plain = isinstance(case, PlainCase)
    states = None if plain or _says(text, "optimizer") else mixed_adamw(case.dtype)
    return Candidate(text=text, words=words, case=None if reason else case, reason=reason, states=states)


def growth(cases: Iterable[CaseLike], subject: Subject, counted: str = "layers") -> pd.DataFrame:
    """mode, tokens, wire_bytes of one rank in a micro-batch by the closed form, for `breakeven.crossings` and its plot.

    counted="layers" leaves out all-to-alls and everything outside the layers; "all" leaves out nothing but what happens
    once a step. Empty when the subject states no closed form of all fields. Raises ValueError for another word.
    """
    if counted not in ("layers", "all"):
        raise ValueError(f"counted={counted}: must say which bytes count; legal: layers, all")
    rows = []
    for case in cases:
        for batch in BATCHES:
            one = _of_a_step(case, batch)
            terms = stated(one, subject)
            form = None if terms is None else closed_forms(terms, (0,), named_axes(one, subject))[0]
            if form is None or form.partial:
                continue
            sent = sum(
                calls * wire_bytes(line.op, line.payload_bytes, line.group_size)
                for line, calls in form.complete.items()
                if _counts(line, counted)
            )
            rows.append((case.mode, int(getattr(one, "tokens", batch)), float(sent) / one.micro))
    return pd.DataFrame(rows, columns=["mode", "tokens", "wire_bytes"])


def _of_a_step(case: CaseLike, batch: int) -> CaseLike:
    """One step of this batch, with one micro-batch unless the schedule of its pipeline needs more of them."""
    try:
        return case.but(batch=batch, steps=1, micro=1)
    except ValueError:
        return case.but(batch=batch, steps=1)


def _counts(line: EventKey, counted: str) -> bool:
    if counted == "all":
        return line.phase not in ("grad_sync", "step")
    return line.phase in PASSES and line.region.startswith("layers.") and line.op != "all_to_all"


_LESS = "recompute=full"
_SPLIT = "mode=isp"
_WIDEST = 8
"""A search widens tp up to so many times."""
Measure = Callable[[Candidate], Forecast]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tried:
    change: str
    forecast: Forecast


def changes(one: Candidate, own: Forecast, subject: Subject, measure: Measure) -> pd.DataFrame:
    """change, peak_bytes, tokens_per_s_per_rank (NaN where nothing was measured), fits ("yes", "no"): what was tried.

    Where the optimizer's states are by formula, a distributed optimizer over the data ranks is counted too, unless the
    case has one (`zero=`).
    """
    search = _Search(one=one, own=own, subject=subject, measure=measure)
    rows: list[tuple[str, float, float]] = []
    kept = own.memory.parameters + own.memory.gradients
    least = kept + own.memory.optimizer / (_data_ranks(own) if one.states else 1)
    if least > own.room_bytes:
        rows.append(("any recompute: parameters, gradients and optimizer stay", kept + own.memory.optimizer, math.nan))
    else:
        rows += _with_split_states(one, search.of_kind([_LESS]))
    for ladder in (_wider(own), _shards(own)):
        rows += _with_split_states(one, search.of_kind(ladder))
    cells = [(change, peak, speed, "yes" if peak <= own.room_bytes else "no") for change, peak, speed in rows]
    return pd.DataFrame(cells, columns=["change", "peak_bytes", "tokens_per_s_per_rank", "fits"])


def _with_split_states(one: Candidate, found: Iterable[_Tried]) -> Iterator[tuple[str, float, float]]:
    """Change, bytes and speed of what was tried; what does not fit also with its optimizer split over data ranks."""
    for tried in found:
        memory, speed, apart = tried.forecast.memory, tried.forecast.tokens_per_s_per_rank, _data_ranks(tried.forecast)
        yield tried.change, memory.peak, speed
        if one.states and not tried.forecast.fits and apart > 1:
            name = f"{tried.change}, and a distributed optimizer over {apart:,} ranks"
            yield name, memory.peak - memory.optimizer * (1 - 1 / apart), speed


def _size(own: Forecast, axis: str) -> int:
    return len(own.case.axes.get(axis, ((0,),))[0])


def _data_ranks(own: Forecast) -> int:
    """Ranks that hold the same states of the optimizer; 1 where the case has them share these already."""
    return 1 if getattr(own.case, "zero", 0) else _size(own, "wdp" if "wdp" in own.case.axes else "dp")


def _wider(own: Forecast) -> list[str]:
    if own.case.mode == _SPLIT.removeprefix("mode="):  # its tp splits no weights
        return []
    tp, dp = _size(own, "tp"), _size(own, "dp")
    factors = [2**power for power in range(1, _WIDEST.bit_length())]
    return [f"tp={tp * factor} dp={dp // factor}" for factor in factors if dp % factor == 0]


def _shards(own: Forecast) -> list[str]:
    world, least = own.case.world_size, _size(own, "wp")
    sizes = [2**power for power in range(1, world.bit_length())]
    return [f"{_SPLIT} wp={size}" for size in sizes if world % size == 0 and size > least]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Search:
    """One case that does not fit, and how another is measured."""

    one: Candidate
    own: Forecast
    subject: Subject
    measure: Measure

    def of_kind(self, ladder: Sequence[str]) -> Iterator[_Tried]:
        """What fits of this ladder, weakest first; or the least that it comes to."""
        legal = [change for change in ladder if self._candidate(change).case is not None]
        if not legal:
            return
        recompute = "" if legal[-1] == _LESS else f" {_LESS}"
        # What backward needs alone is too much: a split of weights changes nothing in that.
        more = recompute if self.own.memory.saved > self.own.room_bytes else ""
        least = self._tried(legal[-1] + more)
        if not least.forecast.fits and more != recompute:
            more = recompute
            least = self._tried(legal[-1] + more)
        if least.forecast.fits:
            for size, change in enumerate(legal[:-1]):
                if self._may_fit(least.forecast, 2 ** (len(legal) - 1 - size)):
                    weaker = self._tried(change + more)
                    if weaker.forecast.fits:
                        yield weaker
                        break
        yield least

    def _may_fit(self, least: Forecast, times: int) -> bool:
        """Whether this many times the states of the least would still fit: the rest can only be more."""
        memory = least.memory
        states = memory.parameters + memory.gradients + memory.optimizer
        return memory.peak + (times - 1) * states <= least.room_bytes

    def _candidate(self, change: str) -> Candidate:
        return candidate(f"{self.one.text} {change}", change, self.subject)

    def _tried(self, change: str) -> _Tried:
        return _Tried(change=change, forecast=self.measure(self._candidate(change)))
