"""Rows that uneven all-to-alls of a recorded program send to each rank: hand-made exchanges, numbers by hand."""

from typing import Any

import pandas as pd
import pytest

from reports.programs import figures, program_tables

UNEVEN, EVEN = (((3, 0), (5, 4)), ((2, 2), (2, 2)))
"""Rows that ranks 0 and 1 send to ranks 0 and 1."""


def ledger(exchange: tuple[tuple[int, int], ...]) -> pd.DataFrame:
    """An exchange in each of two layers; a row has 8 bytes."""
    place = {"step": 0, "phase": "forward", "axis": "ep", "op": "all_to_all", "ranks": "0 1"}
    return pd.DataFrame(
        [
            {**place, "rank": rank, "region": f"layers.{layer}.moe", "payload_bytes": 8 * sum(rows)}
            | {"sent_rows": "+".join(map(str, rows))}
            for layer in (0, 1)
            for rank, rows in enumerate(exchange)
        ]
    )


def test_rows_bytes_and_balance_by_destination(monkeypatch: pytest.MonkeyPatch) -> None:
    run: Any = None
    monkeypatch.setattr(figures, "grouped", lambda _run: ledger(UNEVEN))
    (row,) = figures.exchanges(run).to_dict("records")
    assert row == {
        **{"region": "layers.*.moe", "phase": "forward", "axis": "ep", "calls": 4, "rows": 2 * (3 + 5 + 4)},
        **{"busiest": 0, "busiest_rows": 2 * 8, "busiest_bytes": 2 * 64},
        **{"balance": pytest.approx(16 / 12), "worst": pytest.approx(8 / 6)},
    }
    assert [one.title for one in program_tables._exchanges(run)] == ["Rows sent by uneven all-to-alls"]
    for silent in (ledger(EVEN), ledger(UNEVEN).drop(columns="sent_rows")):
        monkeypatch.setattr(figures, "grouped", lambda _run, silent=silent: silent)
        assert program_tables._exchanges(run) == []
