"""The computing half of `shardproof predict`: every candidate of a text forecast, the fastest, the break-even.

Sizes are bytes, times seconds, all of one rank and one step; nothing is printed here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from harness.engines.dry import DryEngine
from harness.errors import NoNumbers, RequestError
from harness.predicting.clusters import Cluster
from harness.predicting.forecast import Forecast, forecast
from harness.protocols import Subject
from reports import breakeven
from reports.planning import Candidate, candidates, growth

__all__ = ["Prediction", "predict"]

_WHOLE = ("ranks", "tokens", "calls", "payload_bytes", "wire_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What is predicted of one text: a row a candidate (see `_row`), the fastest that fits, and the break-even."""

    text: str
    cluster: Cluster
    rows: pd.DataFrame
    phases: pd.DataFrame
    fastest: str
    crossings: pd.DataFrame
    curves: dict[str, pd.DataFrame]
    forecasts: tuple[Forecast, ...]


def predict(
    text: str,
    subject: Subject,
    cluster: Cluster,
    engine: DryEngine,
    *,
    world: int | None = None,
    tick: Callable[[int, int, str, str], object] = lambda *_: None,
) -> Prediction:
    """The prediction of what a text stands for. Raises RequestError when the text is wrong or cannot be run dry."""
    inner = next((link.ranks for link in cluster.links if link.ranks), 8)
    found = candidates(text, subject, world=world, inner=inner)
    forecasts: list[Forecast | None] = []
    for number, candidate in enumerate(found):
        forecasts.append(_forecast(candidate, subject, cluster, engine, whole=len(found) == 1))
        tick(number + 1, len(found), candidate.text, "" if candidate.case else "illegal")
    rows = _frame([_row(c, f) for c, f in zip(found, forecasts, strict=True)])
    legal = [one for one in forecasts if one is not None]
    modes = {one.case.mode: one.case for one in legal} if world is None else {}
    curves = {way: growth(modes.values(), subject, way) for way in ("layers", "all")} if len(modes) > 1 else {}
    crossings = [breakeven.crossings(curve).assign(counted=way) for way, curve in curves.items()]
    return Prediction(
        text=text,
        cluster=cluster,
        rows=rows,
        phases=_phases(found, forecasts),
        fastest=_fastest(rows, cluster),
        crossings=pd.concat(crossings, ignore_index=True) if crossings else pd.DataFrame(),
        curves=curves,
        forecasts=tuple(legal),
    )


def _forecast(
    candidate: Candidate, subject: Subject, cluster: Cluster, engine: DryEngine, *, whole: bool
) -> Forecast | None:
    if candidate.case is None:
        return None
    try:
        return forecast(candidate.case, subject, cluster, engine, whole=whole)
    except NoNumbers as problem:
        raise RequestError(f"case {candidate.text!r}: cannot be run dry: {problem.cause}") from problem


def _frame(rows: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """The rows; whole numbers stay whole beside a candidate that has none, where pandas would make them floats."""
    return pd.DataFrame(rows).assign(**{name: pd.array([row[name] for row in rows], dtype="Int64") for name in _WHOLE})


def _row(candidate: Candidate, one: Forecast | None) -> dict[str, object]:
    """All that is told of a candidate; numbers are missing where it cannot be. Sizes in bytes, times in seconds."""
    row: dict[str, object] = {"words": candidate.words, "case": candidate.text, "legal": "yes" if one else "no"}
    row["reason"] = candidate.reason
    row["mode"] = one.case.mode if one else candidate.words.split()[0].removeprefix("mode=")
    row["ranks"] = one.case.world_size if one else None
    times, memory, sent = (one.times, one.memory, one.traffic) if one else (None, None, None)
    row |= {
        "step_s": times.total_s if times else None,
        "compute_s": times.compute_s if times else None,
        "exposed_s": sum(times.exposed_s.values()) if times else None,
        "hidden_s": sum(times.hidden_s.values()) if times else None,
        "tokens": one.tokens if one else None,
        "tokens_per_s_per_rank": one.tokens_per_s_per_rank if one else None,
        "flops": one.flops if one else None,
    }
    for name in ("parameters", "gradients", "optimizer", "saved", "peak"):
        row[f"{name}_bytes"] = getattr(memory, name) if memory else None
    for name in ("calls", "payload_bytes", "wire_bytes"):
        row[name] = getattr(sent, name) if sent else None
    return row | {"fits": ("yes" if one.fits else "no") if one else "", "ledger": one.ledger if one else ""}


def _phases(found: Iterable[Candidate], forecasts: Iterable[Forecast | None]) -> pd.DataFrame:
    rows = [
        (candidate.words, phase, one.times.exposed_s.get(phase, 0.0), max(0.0, hidden))
        for candidate, one in zip(found, forecasts, strict=True)
        if one is not None
        for phase, hidden in one.times.hidden_s.items()
    ]
    return pd.DataFrame(rows, columns=["words", "phase", "exposed_s", "hidden_s"])


def _fastest(rows: pd.DataFrame, cluster: Cluster) -> str:
    """The fastest legal candidate that fits, in words; by tokens a second and rank, since meshes may differ in data."""
    room = f"{cluster.device.memory_gib:g} GiB of a {cluster.device.name}"
    legal = rows[rows["legal"] == "yes"]
    fitting = legal[legal["fits"] == "yes"]
    if not len(fitting):
        least = legal.sort_values("peak_bytes", kind="stable").iloc[0]
        need = f"{least['peak_bytes'] / 2**30:,.1f} GiB"
        return f"nothing fits into the {room}: {least['words']} needs least, {need}"
    best = fitting.sort_values("tokens_per_s_per_rank", ascending=False, kind="stable").iloc[0]
    return f"fastest that fits into the {room}: {best['words']}, {best['step_s']:,.4g} s a step"
