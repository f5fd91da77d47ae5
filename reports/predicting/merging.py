"""Several predictions as one: the candidates of all texts side by side, the fastest first."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from reports.predicting.answers import reasons
from reports.predicting.prediction import Prediction, answer


def together(told: Sequence[Prediction]) -> Prediction:
    """One prediction of all these texts, whose candidates are named by the words that they do not all have.

    What belongs to one text alone is left out: crossings of its modes, its stages, what would make it fit.
    """
    texts = [str(case) for one in told for case in one.rows["case"]]
    shared = set.intersection(*(set(text.split()) for text in texts))
    short = {text: " ".join(word for word in text.split() if word not in shared) or text for text in texts}
    rows = pd.concat([one.rows.assign(words=[short[case] for case in one.rows["case"]]) for one in told])
    rows = rows.drop_duplicates("case", ignore_index=True)
    places = [_place(row) for row in rows.to_dict("records")]
    rows = rows.iloc[sorted(range(len(rows)), key=places.__getitem__)].reset_index(drop=True)
    rows = rows.assign(lost=reasons(rows, told[0].cluster))
    phases = [one.phases.replace({"words": _renamed(one, short)}) for one in told]
    first = told[0]
    return replace(
        first,
        text=" ".join(word for word in texts[0].split() if word in shared) or f"{len(told)} cases",
        rows=rows,
        phases=pd.concat(phases, ignore_index=True),
        fastest=answer(rows, pd.DataFrame({"fits": []}), first.cluster),
        states="; ".join(dict.fromkeys(one.states for one in told)),
        forecasts=tuple(forecast for one in told for forecast in one.forecasts),
        changes=first.changes.head(0),
        crossings=first.crossings.head(0),
        beside=first.beside.head(0),
        stages=pd.DataFrame(),
        pipeline=None,
        curves={},
    )


def _renamed(one: Prediction, short: dict[str, str]) -> dict[str, str]:
    return {str(row["words"]): short[str(row["case"])] for row in one.rows.to_dict("records")}


def _place(row: Mapping[Hashable, Any]) -> tuple[int, float]:
    """As in one prediction: what fits by its speed, what does not by what it needs, what cannot be."""
    if row["legal"] != "yes":
        return 2, 0.0
    if row["fits"] != "yes":
        return 1, float(row["peak_bytes"])
    speed = row["tokens_per_s_per_rank"]
    return 0, float(row["step_s"]) if pd.isna(speed) else -float(speed)
