"""Layouts of a model on a number of ranks: all legal ones estimated, the best of them to be forecast.

A layout has the words that the text leaves open: mode, tp, pp (even or uneven stages), dp, zero (0 to 3) and recompute.
cp=2 and cp=4 are tried where nothing fits without. Modes are tp and tp-sp; the others of the subject are tried where
the best layout without stages lies. The case itself decides what is legal. All layouts train on the same tokens a step:
`micro` micro-batches for each of the ranks.

A model is measured once for every mode, tp, cp and recompute, on one stage and one data rank, at two depths. A layer
and the rest follow from these. For stage r of pp with l of the layers, d data ranks, m micro-batches:

    memory   states of what the stage holds, split over d as zero= says, with zero=2|3 what is gathered; what a layer
             leaves for backward, l times, for each of min(pp - r, m) micro-batches; on the last stage what lies
             outside of layers
    time     one micro-batch on every stage, m - 1 more on the slowest; the sum of gradients over d, for zero=2|3
             gathers and sums of every micro-batch; stages sum once a step, and gather once unless zero=3

Sizes are bytes, times seconds.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

from shardproof.harness.errors import RequestError
from shardproof.harness.predicting.clusters import Cluster
from shardproof.harness.predicting.costs import route, seconds
from shardproof.harness.predicting.figures import Forecast
from shardproof.harness.predicting.timeline import AFTER_BACKWARD
from shardproof.harness.protocols import Subject
from shardproof.harness.subject import claimed, named
from shardproof.reports.predicting.planning import Candidate, candidate, stated_words

_OPEN = {"zero": ("0", "1", "2", "3"), "recompute": ("none", "selective", "full")}
_SIZES = ("tp", "cp", "pp", "dp", "zero", "micro")
_CONTEXT = ("1",), ("2", "4")
_USUAL = ("tp", "tp-sp")
_UNITS = (1, 2)
"""Units of layers at which a model is measured."""
Measure = Callable[[Candidate], Forecast]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A legal layout with what it is estimated to need and to take; `fits` into the device's memory."""

    candidate: Candidate
    peak_bytes: float
    tokens_per_s_per_rank: float
    fits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """A quantity of a model: `layer` for each of its layers, and `outside` of them."""

    layer: float
    outside: float

    @classmethod
    def through(cls, low: float, high: float, depths: tuple[int, int]) -> "_Line":
        layer = (high - low) / (depths[1] - depths[0])
        return cls(layer=layer, outside=low - layer * depths[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    """Bytes and times of a model on one stage and data rank.

    `gradients` and `optimizer` are bytes for each byte of `parameters`. `left` is what a micro-batch leaves for
    backward or needs for a moment, `micro_s` its time.
    """

    parameters: _Line
    gradients: float
    optimizer: float
    left: _Line
    micro_s: _Line
    tokens: float
    room_bytes: float


def estimates(text: str, subject: Subject, cluster: Cluster, world: int, measure: Measure) -> list[Estimate]:
    """All legal layouts of a text on this many ranks: what fits first, the fastest first; then by what they need.

    Raises RequestError when no layout is legal, and for a size that is none.
    """
    stated = _readable(text, subject)
    inner = next((link.ranks for link in cluster.links if link.ranks), 8)
    legal: list[Estimate] = []
    known: dict[str, _Measured] = {}

    def estimated(layouts: Iterator[str]) -> Iterator[Estimate]:
        for words in layouts:
            one = candidate(" ".join([text, words]), words, subject)
            if one.case is not None:
                yield _estimate(one, cluster, known, measure)

    for contexts in ((stated["cp"],),) if "cp" in stated else _CONTEXT:
        legal += estimated(_layouts(stated, world, inner, contexts))
        if any(one.fits for one in legal):
            break
    if not legal:
        words = next(_layouts(stated, world, inner, ("1",)), f"tp={world} dp=1")
        raise RequestError(f"case {text!r}: {candidate(f'{text} {words}', words, subject).reason or 'has no layout'}")
    flat = [one for one in legal if " pp=1 " in one.candidate.words and " tp=1 " not in one.candidate.words]
    if flat and "mode" not in stated:
        others = [mode for mode in claimed(named(subject)) or () if mode not in _USUAL]
        best = stated_words(min(flat, key=_place).candidate.words)
        for mode in others:
            over = [{**best, "mode": mode, "zero": "0", "wp": str(wp)} for wp in sorted({inner, world})]
            shared = [*estimated(_written(over))]  # modes that gather weights, over a node or over all ranks
            legal += shared or estimated(_written([{**best, "mode": mode}]))
    return sorted(legal, key=_place)


def _place(estimate: Estimate) -> tuple[bool, float]:
    return not estimate.fits, -estimate.tokens_per_s_per_rank if estimate.fits else estimate.peak_bytes


def _readable(text: str, subject: Subject) -> dict[str, str]:
    """The words of a text, with micro-batches and layers of its preset. Raises RequestError for a size that is none."""
    stated = stated_words(text)
    for key in _SIZES:
        if key in stated and not (stated[key].isdecimal() and (int(stated[key]) or key == "zero")):
            raise RequestError(f"case {text!r}: {candidate(text, text, subject).reason}")
    plain = candidate(f"{text} mode=tp tp=1 cp=1 pp=1 dp=1 zero=0", text, subject).case
    return (
        stated if plain is None else {**stated, "micro": str(plain.micro), "layers": str(getattr(plain, "layers", 0))}
    )


def _layouts(stated: dict[str, str], world: int, inner: int, contexts: tuple[str, ...]) -> Iterator[str]:
    """The words of every layout of these ranks that the text leaves open, legal or not."""
    powers = [str(2**power) for power in range(world.bit_length())]
    tps = (stated["tp"],) if "tp" in stated else tuple(p for p in powers if int(p) <= inner)
    pps = (stated["pp"],) if "pp" in stated else powers
    zeros, recomputes = ((stated[key],) if key in stated else values for key, values in _OPEN.items())
    micro = int(stated.get("micro", "2"))
    for tp, cp, pp in product(tps, contexts, pps):
        inside = int(tp) * int(cp) * int(pp)
        if world % inside == 0 and stated.get("dp", str(world // inside)) == str(world // inside):
            mode = stated.get("mode", "tp-sp" if int(tp) > 1 else "tp")
            several = zeros if world > int(tp) * int(pp) else zeros[:1]
            for zero, recompute, stages in product(several, recomputes, _stages(stated, int(pp))):
                mesh = f"mode={mode} tp={tp} cp={cp} pp={pp} dp={world // inside}"
                kept = " no_sync=true" if int(pp) > 1 and int(zero) >= 2 and "no_sync" not in stated else ""
                yield f"{mesh} zero={zero} recompute={recompute} micro={micro * inside}{stages}{kept}"


def _stages(stated: dict[str, str], pp: int) -> Iterator[str]:
    """Words of even stages, and of longer ones between a shorter first and last."""
    yield ""
    layers = int(stated.get("layers", "0"))
    ends = layers - (pp - 2) * (-(-layers // pp) + (layers % pp == 0))
    if pp > 2 and ends >= 2 and not stated.keys() & {"first_layers", "last_layers", "schedule"}:
        yield f" first_layers={ends - ends // 2} last_layers={ends // 2}"


def _written(layouts: Iterable[Mapping[str, str]]) -> Iterator[str]:
    for words in layouts:
        yield " ".join(f"{key}={value}" for key, value in words.items())


def _measured(one: Candidate, measure: Measure) -> _Measured:
    """The case on one stage and one data rank. Raises RequestError when it cannot be."""
    case = one.case
    assert case is not None
    first, unit = getattr(case, "repeating_layers", (0, 1))
    depths = first + unit * _UNITS[0], first + unit * _UNITS[1]
    try:
        alone = case if "wp" in stated_words(one.text) else case.but(pp=1, dp=1, zero=0)
        low, high = (
            measure(replace(one, text=str(short), case=short))
            for short in [alone.but(layers=depth, micro=2) for depth in depths]
        )
    except ValueError as problem:
        raise RequestError(f"case {one.text!r}: cannot be measured on one stage and data rank: {problem}") from problem

    def line(of: Callable[[Forecast], float]) -> _Line:
        return _Line.through(of(low), of(high), depths)

    def states(made: Forecast) -> float:
        return made.memory.parameters + made.memory.gradients + made.memory.optimizer

    def micro_s(made: Forecast) -> float:
        exposed = sum(s for phase, s in made.times.exposed_s.items() if phase not in AFTER_BACKWARD)
        return (made.times.compute_s + exposed) / 2

    parameters = line(lambda made: made.memory.parameters)
    return _Measured(
        parameters=parameters,
        gradients=high.memory.gradients / high.memory.parameters,
        optimizer=high.memory.optimizer / high.memory.parameters,
        left=line(lambda made: made.memory.peak - states(made)),
        micro_s=line(micro_s),
        tokens=high.tokens / 2,
        room_bytes=high.room_bytes,
    )


def _estimate(one: Candidate, cluster: Cluster, known: dict[str, _Measured], measure: Measure) -> Estimate:
    assert one.case is not None
    stated = stated_words(one.text)
    tp, cp, pp, dp, micro, zero = (int(stated[key]) for key in ("tp", "cp", "pp", "dp", "micro", "zero"))
    key = " ".join(f"{word}={stated.get(word)}" for word in ("mode", "tp", "cp", "recompute", "wp"))
    if key not in known:
        known[key] = _measured(one, measure)
    model, ranks = known[key], 1 if "wp" in stated else dp * cp
    layers = _layers_of_stages(one, pp)
    peak = max(
        _peak(model, count, place, pp, min(pp - place, micro), zero, ranks) for place, count in enumerate(layers)
    )
    stages_s = [model.micro_s.layer * count for count in layers]
    stages_s[-1] += model.micro_s.outside
    size = int(model.parameters.layer * layers[0] + model.parameters.outside * (0.5 if pp > 1 else 1))
    data = route([tp * place for place in range(ranks)], cluster)
    gather_s = seconds("all_gather", size, data, cluster.algorithm) if ranks > 1 else 0.0
    sum_s = seconds("all_reduce", size, data, cluster.algorithm) if ranks > 1 else 0.0
    if zero < 2:
        shared_s = sum_s
    elif pp > 1:
        shared_s = (1 if zero == 2 else 1 + micro) * gather_s + sum_s / 2
    else:
        shared_s = micro * ((zero - 1) * gather_s + sum_s / 2)
    step_s = (micro - 1) * max(stages_s) + sum(stages_s) + shared_s
    tokens = model.tokens * micro * (1 if "wp" in stated else dp)
    speed = tokens / step_s / one.case.world_size
    return Estimate(candidate=one, peak_bytes=peak, tokens_per_s_per_rank=speed, fits=peak <= model.room_bytes)


def _layers_of_stages(one: Candidate, pp: int) -> list[int]:
    words, layers = stated_words(one.text), int(getattr(one.case, "layers", 0))
    first, last = (int(words.get(word, "0")) for word in ("first_layers", "last_layers"))
    if not first and not last:
        return [layers // pp] * pp
    stated = (first > 0) + (last > 0)
    even = (layers - first - last) // max(pp - stated, 1)
    return [first or even, *[even] * (pp - 2), last or even]


def _peak(model: _Measured, layers: int, place: int, pp: int, in_flight: int, zero: int, ranks: int) -> float:
    """Bytes of the stage at this place."""
    outside = model.parameters.outside if pp == 1 else model.parameters.outside / 2 * (place in (0, pp - 1))
    parameters = model.parameters.layer * layers + outside
    summed_once = pp > 1  # gradients stay whole until then, parameters from a backward to the next forward
    gathered = parameters if zero == 2 else (outside + model.parameters.layer if zero == 3 else 0.0)
    gathered = parameters if zero == 3 and summed_once else gathered
    states = (
        parameters / (ranks if zero >= 2 else 1)
        + parameters * model.gradients / (ranks if zero >= 2 and not summed_once else 1)
        + parameters * model.optimizer / (ranks if zero >= 1 else 1)
    )
    at_a_time = 0.0 if zero < 2 or summed_once else outside + model.parameters.layer  # gradients that are reduced
    left = model.left.layer * layers * in_flight + (model.left.outside if place == pp - 1 else 0.0)
    # After backward one buffer of all gradients is summed, or with zero=1 one of all parameters gathered.
    buffer = 0.0 if zero >= 2 or ranks == 1 else parameters * (1.0 if zero else model.gradients)
    return states + gathered + at_a_time + max(left, buffer)
