"""Tables of what changes with the load of experts: memory by stage, bytes by stage and call."""

from collections.abc import Callable

import pandas as pd

from reports.predicting.loads import CALL
from reports.predicting.written import gibibytes, table
from reports.printing.text_tables import Table, count

_BUSIEST = "of a step, on the rank of a stage that holds the experts which a skew loads"
_Columns = dict[str, tuple[str, Callable[[object], str]]]


def load_tables(memory: pd.DataFrame, calls: pd.DataFrame) -> list[Table]:
    """Of the frames of `reports.predicting.loads`, a column for every load; none where no load is said."""
    made = []
    loads = [str(load) for load in dict.fromkeys(calls["load"])]
    if len(memory) and len(loads) > 1:
        sizes = memory[["stage", "layers"]].drop_duplicates()
        for load, of_load in memory.groupby("load"):
            named = {f"{part}_bytes": f"{part}_bytes {load}" for part in ("saved", "peak")}
            sizes = sizes.merge(of_load.rename(columns=named)[["stage", *named.values()]], on="stage")
        columns: _Columns = {"stage": ("stage", str), "layers": ("layers", str)}
        for part in ("saved", "peak"):
            columns |= {f"{part} {_short(load)}": (f"{part}_bytes {load}", gibibytes) for load in loads}
        made.append(table("Memory of every stage by load", sizes, columns, f"GiB; {_BUSIEST}"))
    if len(calls):
        order = calls[[*CALL, "calls"]].drop_duplicates()
        sent = calls.pivot(index=[*CALL, "calls"], columns="load", values="payload_bytes").reset_index()
        columns = {name: (name, str) for name in CALL} | {"calls": ("calls", count)}
        columns |= {_short(load): (load, gibibytes) for load in loads}
        shown = order.merge(sent, how="left", on=[*CALL, "calls"])
        made.append(table("Bytes of every stage and call", shown, columns, f"GiB that a rank hands over; {_BUSIEST}"))
    return made


def _short(load: str) -> str:
    return load.replace("routing=", "")
