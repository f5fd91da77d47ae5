"""The table of rows that experts get, from experts.csv of a run folder: what subjects return as `routing/...`."""

from pathlib import Path

import pandas as pd

from shardproof.reports.printing.text_tables import Table, count, table, three
from shardproof.reports.stored.tables import csv_table

_TYPES = {"case": "str", "step": "int64", "module": "str", "expert": "int64", "rows": "int64"}
_MOST = 64
"""Experts whose rows are written out."""


def expert_tables(folder: Path) -> list[Table]:
    """Table of experts, a row for every case and module; none where no case of the run has any."""
    if not (folder / "experts.csv").is_file():
        return []
    rows = csv_table(folder / "experts.csv", _TYPES, tuple(_TYPES), [])
    places = rows.groupby(["case", "module"], sort=False)
    frame = pd.DataFrame(
        [{**dict(zip(("case", "module"), key, strict=True)), **_sum_place(part)} for key, part in places]
    )
    columns = (str, "case | module"), (count, "rows"), (str, "by expert: by_expert | busiest")
    note = "tokens that go to each expert, of all ranks, micro-batches and steps; balance: the busiest over the mean"
    return [table("Rows of experts", frame, *columns, (three, "balance | worst step: worst"), note=note)]


def _sum_place(rows: pd.DataFrame) -> dict[str, object]:
    """The rows of one module, added up over steps."""
    every = rows.groupby("expert")["rows"].sum()
    steps = rows.groupby("step")["rows"]
    more = f" and {len(every) - _MOST} more" if len(every) > _MOST else ""
    return {
        "rows": every.sum(),
        "by_expert": " ".join(str(one) for one in every.head(_MOST)) + more,
        "busiest": str(every.idxmax()),
        "balance": every.max() / every.mean() if every.sum() else 1.0,
        "worst": (steps.max() / steps.mean()).max() if every.sum() else 1.0,
    }
