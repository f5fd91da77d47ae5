"""The computing half of `shardproof predict`: every candidate of a text forecast, the fastest first, the break-even.

Several texts are one prediction: their candidates side by side. Sizes are bytes, times seconds, all of one rank and one
step; nothing is printed here.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from shardproof.harness.engines.shapes.dry import DryEngine
from shardproof.harness.errors import NoNumbers, NotComputed, RequestError
from shardproof.harness.plain_case import WordError
from shardproof.harness.predicting.clusters import Cluster
from shardproof.harness.predicting.figures import Forecast
from shardproof.harness.predicting.forecast import forecast
from shardproof.harness.protocols import Subject
from shardproof.harness.subject import named
from shardproof.reports.comparing.growth import crossings
from shardproof.reports.predicting import loads, pipelines
from shardproof.reports.predicting.answers import reasons
from shardproof.reports.predicting.planning import DTYPE, LOADS, Candidate, candidates, chooses, growth, stated_words
from shardproof.reports.predicting.suggesting import estimates
from shardproof.reports.printing.text_tables import figure

_GIB = 2**30
_SUGGESTED = 3
"""Layouts that are forecast, of all those that were estimated."""
_SIZES = ("seq", "batch", "micro")
_WHOLE = ("ranks", "tokens", "calls", "payload_bytes", "wire_bytes", *_SIZES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A prediction of one text: `fastest` is the answer in words, `rows` a candidate each, fastest first.

    Rows that fit come before rows that do not, and those before cases that cannot be. Columns: `_row`, and `lost`, why
    it is not the first. `phases`: seconds by candidate and phase. `states`: bytes kept of every parameter where they
    are by formula, "" where the program's own were measured. `stages`: the stages of the pipeline of the first row that
    has one (reports.predicting.pipelines), `pipeline` its forecast. `loads` and `calls`: what stages need and which
    bytes they send by the load of experts, where one is given (reports.predicting.loads). `beside`: what and how much
    the subject states beside its closed form (`subject.beside(case)`), of a single case.
    """

    text: str
    cluster: Cluster
    rows: pd.DataFrame
    phases: pd.DataFrame
    fastest: str
    states: str
    crossings: pd.DataFrame
    curves: dict[str, pd.DataFrame]
    forecasts: tuple[Forecast, ...]
    beside: pd.DataFrame
    stages: pd.DataFrame
    pipeline: Forecast | None
    loads: pd.DataFrame
    calls: pd.DataFrame


def predict(
    text: str,
    subject: Subject,
    cluster: Cluster,
    engine: DryEngine,
    *,
    world: int | None = None,
    suggest: bool = False,
    tick: Callable[[int, int, str, str], object] = lambda *_: None,
) -> Prediction:
    """The prediction of what a text stands for; with `suggest` of the best layouts of `world` ranks by estimate.

    Raises RequestError when the text is wrong or cannot be run dry, and for a suggestion without a world.
    """
    inner = next((link.ranks for link in cluster.links if link.ranks), 8)
    if suggest:
        found = _suggested(text, subject, cluster, engine, world)
    else:
        found = candidates(text, subject, world=world, inner=inner)
    made: list[tuple[Candidate, Forecast | None]] = []
    for number, candidate in enumerate(found):
        one = _measured(candidate, subject, cluster, engine, whole=len(found) == 1) if candidate.case else None
        made.append((candidate, one))
        tick(number + 1, len(found), candidate.text, "" if candidate.case else "illegal")
    made.sort(key=lambda pair: _place(_row(*pair)))
    rows = _frame([_row(candidate, one) for candidate, one in made])
    rows = rows.assign(lost=reasons(rows, cluster))
    legal = [one for _, one in made if one is not None]
    staged = next((one for one in legal if one.stages), None)
    modes = {one.case.mode: one.case for one in legal} if world is None else {}
    curves = {way: growth(modes.values(), subject, way) for way in ("layers", "all")} if len(modes) > 1 else {}
    by_load = {one.load: made for one, made in made if made is not None and one.load} if len(modes) == 1 else {}
    crossed = [crossings(curve).assign(counted=way) for way, curve in curves.items()]
    return Prediction(
        text=text,
        cluster=cluster,
        rows=rows,
        phases=_phases(made),
        fastest=answer(rows, cluster, suggested=suggest),
        states=_states(made),
        crossings=pd.concat(crossed, ignore_index=True) if crossed else pd.DataFrame(),
        curves=curves,
        forecasts=tuple(legal),
        beside=_beside(legal, subject),
        stages=pd.DataFrame() if staged is None else pipelines.stages(staged),
        pipeline=staged,
        loads=loads.memory(by_load),
        calls=loads.calls(by_load),
    )


def _suggested(text: str, subject: Subject, cluster: Cluster, engine: DryEngine, world: int | None) -> list[Candidate]:
    if world is None or world < 1:
        raise RequestError("suggest: needs the number of ranks; legal: --suggest --world 64")
    ready = text if "dtype" in stated_words(text) else f"{text} {DTYPE}"
    ready = f"{ready} {LOADS[0]}" if chooses(text, subject) else ready
    layouts = estimates(ready, subject, cluster, world, lambda one: _measured(one, subject, cluster, engine))
    return [one.candidate for one in layouts[:_SUGGESTED]]


def _beside(legal: Sequence[Forecast], subject: Subject) -> pd.DataFrame:
    lines = getattr(named(subject).call, "beside", None)
    found = lines(legal[0].case) if lines is not None and len(legal) == 1 else ()
    return pd.DataFrame(found, columns=["what", "how much"])


def _measured(
    candidate: Candidate, subject: Subject, cluster: Cluster, engine: DryEngine, *, whole: bool = False
) -> Forecast:
    """The forecast of a candidate whose case can be."""
    if candidate.case is None:
        raise ValueError(f"candidate={candidate.text}: cannot be: {candidate.reason}")
    try:
        return forecast(candidate.case, subject, cluster, engine, whole=whole, states=candidate.states)
    except (NoNumbers, NotComputed) as problem:
        raise RequestError(f"case {candidate.text!r}: cannot be run dry: {problem.cause}") from problem
    except WordError as problem:
        rule = "cannot be predicted, which runs fewer steps, micro-batches or layers of it"
        raise RequestError(f"case {candidate.text!r}: {rule}: {problem}") from problem


def _place(row: Mapping[Any, Any]) -> tuple[int, float]:
    """Fastest first; what does not fit behind what does, by what it needs; what cannot be last, as requested."""
    if row["legal"] != "yes":
        return 2, 0.0
    if row["fits"] != "yes":
        return 1, float(row["peak_bytes"])
    speed = row["tokens_per_s_per_rank"]
    return 0, float(row["step_s"]) if pd.isna(speed) else -float(speed)


def _frame(rows: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """The rows; whole numbers stay whole beside a candidate that has none, where pandas would make them floats."""
    return pd.DataFrame(rows).assign(**{name: pd.array([row[name] for row in rows], dtype="Int64") for name in _WHOLE})


def _row(candidate: Candidate, one: Forecast | None) -> dict[str, Any]:
    """The row of a candidate; numbers are missing where it cannot be. Sizes in bytes, times in seconds."""
    row: dict[str, Any] = {"words": candidate.words, "case": candidate.text, "legal": "yes" if one else "no"}
    row["reason"] = candidate.reason
    row["mode"] = one.case.mode if one else candidate.words.split()[0].removeprefix("mode=")
    row["ranks"] = one.case.world_size if one else None
    times, memory, sent = (one.times, one.memory, one.traffic) if one else (None, None, None)
    row |= {
        "step_s": times.total_s if times else None,
        "compute_s": times.compute_s if times else None,
        "exposed_s": sum(times.exposed_s.values()) if times else None,
        "hidden_s": sum(times.hidden_s.values()) if times else None,
        "tokens": (one.tokens or None) if one else None,
        "tokens_per_s_per_rank": one.tokens_per_s_per_rank if one else None,
        "tokens_per_s": one.tokens_per_s_per_rank * one.case.world_size if one else None,
        "flops": one.flops if one else None,
        "bubble": one.bubble if one else None,
        "bubble_stated": one.bubble_stated if one else None,
    }
    for name in ("parameters", "gradients", "optimizer", "saved", "peak"):
        row[f"{name}_bytes"] = getattr(memory, name) if memory else None
    for name in ("calls", "payload_bytes", "wire_bytes"):
        row[name] = getattr(sent, name) if sent else None
    sizes = {name: getattr(one.case, name, None) if one else None for name in _SIZES}
    row |= {name: size if type(size) is int else None for name, size in sizes.items()}
    return row | {"fits": ("yes" if one.fits else "no") if one else "", "ledger": one.ledger if one else ""}


def _phases(made: Iterable[tuple[Candidate, Forecast | None]]) -> pd.DataFrame:
    rows = [
        (candidate.words, phase, one.times.exposed_s.get(phase, 0.0), max(0.0, hidden))
        for candidate, one in made
        if one is not None
        for phase, hidden in one.times.hidden_s.items()
    ]
    return pd.DataFrame(rows, columns=["words", "phase", "exposed_s", "hidden_s"])


def answer(rows: pd.DataFrame, cluster: Cluster, *, suggested: bool = False) -> str:
    """The answer: the fastest legal candidate that fits.

    Fastest is by tokens a second and rank, for meshes may differ in data. Where nothing fits, the answer names the
    words that look for more.
    """
    room = f"{cluster.device.memory_gib:g} GiB of a {cluster.device.name}"
    best = rows.iloc[0]
    name = best["words"] if len(rows) > 1 else best["case"]
    need = best["peak_bytes"] / _GIB
    step_s = best["step_s"]
    if best["fits"] == "yes" and pd.isna(best["tokens"]):
        return f"fastest that fits into the {room}: {name}: {figure(step_s)} s a step; it needs {figure(need)} GiB"
    if best["fits"] == "yes":
        each, together = figure(best["tokens_per_s_per_rank"]), figure(best["tokens_per_s"])
        speed = f"{each} tokens/s a GPU, {together} on {best['ranks']:,}"
        return f"fastest that fits into the {room}: {name}: {speed}; it needs {figure(need)} GiB"
    message = f"nothing fits into the {room}: {name} needs least, {figure(need)} GiB"
    message += f" ({need / cluster.device.memory_gib:.2g}x)"
    return (
        message
        if suggested
        else f"{message}; --world {best['ranks']} --suggest looks for layouts of as many ranks that do"
    )


def _states(made: Iterable[tuple[Candidate, Forecast | None]]) -> str:
    """Bytes that training keeps of every parameter, in words."""
    for candidate, one in made:
        kept = candidate.states
        if one is not None and kept is not None:
            parts = (
                f"parameter {kept.parameter}, gradient {kept.gradient}, master {kept.master}, moments {kept.moments}"
            )
            return f"{one.case.dtype}, AdamW as in Megatron-LM: {kept.together} bytes a parameter ({parts})"
    return ""


def together(predictions: Sequence[Prediction]) -> Prediction:
    """Prediction of all these texts, whose candidates are named by the words that they do not all have.

    Parts of one text alone are left out: crossings of its modes, its stages.
    """
    texts = [str(case) for one in predictions for case in one.rows["case"]]
    shared = set.intersection(*(set(text.split()) for text in texts))
    short = {text: " ".join(word for word in text.split() if word not in shared) or text for text in texts}
    rows = pd.concat([one.rows.assign(words=[short[case] for case in one.rows["case"]]) for one in predictions])
    rows = rows.drop_duplicates("case", ignore_index=True)
    places = [_place(row) for row in rows.to_dict("records")]
    rows = rows.iloc[sorted(range(len(rows)), key=places.__getitem__)].reset_index(drop=True)
    rows = rows.assign(lost=reasons(rows, predictions[0].cluster))
    renamed = [dict(zip(one.rows["words"], one.rows["case"].map(short), strict=True)) for one in predictions]
    phases = [one.phases.replace({"words": words}) for one, words in zip(predictions, renamed, strict=True)]
    first = predictions[0]
    return replace(
        first,
        text=" ".join(word for word in texts[0].split() if word in shared) or f"{len(predictions)} cases",
        rows=rows,
        phases=pd.concat(phases, ignore_index=True),
        fastest=answer(rows, first.cluster),
        states="; ".join(dict.fromkeys(one.states for one in predictions)),
        forecasts=tuple(forecast for one in predictions for forecast in one.forecasts),
        crossings=first.crossings.head(0),
        beside=first.beside.head(0),
        stages=pd.DataFrame(),
        pipeline=None,
        loads=first.loads.head(0),
        calls=first.calls.head(0),
        curves={},
    )
