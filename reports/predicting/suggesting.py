"""Layouts of a model on a number of ranks: all legal ones estimated, the best of them to be forecast.

A layout is what the text leaves open of mode (tp, tp-sp), tp, pp, dp, zero (0, 1, 3) and recompute (none, full); cp=2
and cp=4 are tried where nothing fits without. What is legal the case itself decides. All layouts train on the same
tokens a step: `micro` micro-batches for each of the ranks. A model is measured once for every tp, cp and recompute, on
one stage and one data rank; from that, for pp stages and d data ranks, with m = micro * ranks / d micro-batches:

    memory   states of a 1/pp of the parameters, split over d as zero= says; what backward needs, a 1/pp of it for each
             of min(pp, m) micro-batches; what lives for a moment
    time     (m + pp - 1) micro-batches of a 1/pp of the layers; the sum of gradients over d, for zero=3 gathers and
             sums of every micro-batch

Sizes are bytes, times seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product

from harness.errors import RequestError
from harness.predicting.clusters import Cluster
from harness.predicting.costs import route, seconds
from harness.predicting.figures import Forecast
from harness.predicting.timeline import AFTER_BACKWARD
from harness.protocols import Subject
from reports.predicting.planning import Candidate, candidate, stated_words

__all__ = ["Estimate", "estimates"]

_OPEN = {"zero": ("0", "1", "3"), "recompute": ("none", "full")}
_SIZES = ("tp", "cp", "pp", "dp", "zero", "micro")
_CONTEXT = ("1",), ("2", "4")
Measure = Callable[[Candidate], Forecast]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A legal layout with what it is estimated to need and to take; `fits` into the device's memory."""

    candidate: Candidate
    peak_bytes: float
    tokens_per_s_per_rank: float
    fits: bool


def estimates(text: str, subject: Subject, cluster: Cluster, world: int, measure: Measure) -> list[Estimate]:
    """All legal layouts of a text on this many ranks: what fits first, the fastest first; then by what they need.

    Raises RequestError when no layout is legal, and for a size that is none.
    """
    said = _readable(text, subject)
    inner = next((link.ranks for link in cluster.links if link.ranks), 8)
    found: list[Estimate] = []
    measured: dict[str, Forecast] = {}
    for contexts in ((said["cp"],),) if "cp" in said else _CONTEXT:
        for words in _layouts(said, world, inner, contexts):
            one = candidate(" ".join([text, words]), words, subject)
            if one.case is not None:
                found.append(_estimate(one, cluster, measured, measure))
        if any(one.fits for one in found):
            break
    if not found:
        words = next(_layouts(said, world, inner, ("1",)), f"tp={world} dp=1")
        raise RequestError(f"case {text!r}: {candidate(f'{text} {words}', words, subject).reason or 'has no layout'}")
    return sorted(found, key=lambda one: (not one.fits, -one.tokens_per_s_per_rank if one.fits else one.peak_bytes))


def _readable(text: str, subject: Subject) -> dict[str, str]:
    """The words of a text, with the micro-batches of its preset. Raises RequestError for a size that is none."""
    said = stated_words(text)
    for key in _SIZES:
        if key in said and not (said[key].isdecimal() and (int(said[key]) or key == "zero")):
            raise RequestError(f"case {text!r}: {candidate(text, text, subject).reason}")
    plain = candidate(f"{text} mode=tp tp=1 cp=1 pp=1 dp=1 zero=0", text, subject).case
    return said if "micro" in said or plain is None else {**said, "micro": str(plain.micro)}


def _layouts(said: dict[str, str], world: int, inner: int, contexts: tuple[str, ...]) -> Iterator[str]:
    """The words of every layout of these ranks that the text leaves open, legal or not."""
    powers = [str(2**power) for power in range(world.bit_length())]
    tps = (said["tp"],) if "tp" in said else tuple(p for p in powers if int(p) <= inner)
    pps = (said["pp"],) if "pp" in said else powers
    zeros, recomputes = ((said[key],) if key in said else values for key, values in _OPEN.items())
    micro = int(said.get("micro", "2"))
    for tp, cp, pp in product(tps, contexts, pps):
        inside = int(tp) * int(cp) * int(pp)
        if world % inside == 0 and said.get("dp", str(world // inside)) == str(world // inside):
            mode = said.get("mode", "tp-sp" if int(tp) > 1 else "tp")
            for zero, recompute in product(zeros if world > int(tp) * int(pp) else zeros[:1], recomputes):
                mesh = f"mode={mode} tp={tp} cp={cp} pp={pp} dp={world // inside}"
                yield f"{mesh} zero={zero} recompute={recompute} micro={micro * inside}"


def _estimate(one: Candidate, cluster: Cluster, measured: dict[str, Forecast], measure: Measure) -> Estimate:
    assert one.case is not None
    said = stated_words(one.text)
    tp, cp, pp, dp, micro = (int(said[key]) for key in ("tp", "cp", "pp", "dp", "micro"))
    key = f"mode={said['mode']} tp={tp} cp={cp} recompute={said['recompute']}"
    if key not in measured:
        try:
            alone_case = one.case.but(pp=1, dp=1, zero=0, micro=2)
        except ValueError as problem:
            raise RequestError(
                f"case {one.text!r}: cannot be measured on one stage and data rank: {problem}"
            ) from problem
        measured[key] = measure(replace(one, text=str(alone_case), words=key, case=alone_case))
    alone, ranks, zero = measured[key], dp * cp, int(said["zero"])
    memory = alone.memory
    shared = {"parameters": zero == 3, "gradients": zero == 3, "optimizer": zero >= 1}
    states = sum(getattr(memory, part) / pp / (ranks if split else 1) for part, split in shared.items())
    moment = memory.peak - memory.saved - memory.parameters - memory.gradients - memory.optimizer
    peak = states + memory.saved / pp * min(pp, micro) + max(0.0, moment)
    own_s = alone.times.compute_s + sum(s for phase, s in alone.times.exposed_s.items() if phase not in AFTER_BACKWARD)
    data = route([tp * place for place in range(ranks)], cluster)
    size = int(memory.parameters / pp)
    gather_s = seconds("all_gather", size, data, cluster.algorithm) if ranks > 1 else 0.0
    sum_s = seconds("all_reduce", size, data, cluster.algorithm) if ranks > 1 else 0.0
    apart_s = micro * (2 * gather_s + sum_s / 2) if zero == 3 else sum_s
    step_s = own_s / 2 / pp * (micro + pp - 1) + apart_s
    tokens = alone.tokens / 2 * micro * dp
    speed = tokens / step_s / one.case.world_size
    return Estimate(candidate=one, peak_bytes=peak, tokens_per_s_per_rank=speed, fits=peak <= alone.room_bytes)
