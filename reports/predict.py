"""`shardproof predict`: time, memory and bytes of cases on a cluster that is not here; which mode, and from where on.

The numbers are the harness's (harness.predicting.forecast); here they are asked for, laid out and told, with what they
assume.
"""

from __future__ import annotations

import argparse
import datetime
import html
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from harness.engines.dry import DryEngine
from harness.errors import RequestError
from harness.ledger import COLUMNS
from harness.predicting.cluster_presets import PRESETS
from harness.predicting.clusters import read
from harness.predicting.forecast import DEPTHS
from harness.resolve import resolve
from reports import tables
from reports.prediction import Prediction, predict
from reports.tables import Table
from reports.text import plain, show_message, show_table, ticking

__all__ = ["ASSUMPTIONS", "main"]

ASSUMPTIONS = (
    "compute: FLOPs of matrix products and attention as the dry run counts them (masked pairs too), over peak x "
    "efficiency of the device; element-wise work, the optimizer's and launch times are left out",
    "communication: the alpha-beta model of every call, ring and tree, over the links between the ranks of its group; "
    "all ranks come at once, groups and links do not disturb each other",
    "overlap: what the program itself does between issuing a call and waiting for it; a call that it waits for at once "
    "is exposed, the sum of all gradients after backward among them",
    "memory: all that the program's tensors hold; allocator, contexts and libraries come on top",
    f"deep models: memory, and times where cases are compared, are the straight line through {DEPTHS[0]} and "
    f"{DEPTHS[1]} layers",
    "errors: calls, bytes and parameters are exact where the ledger is 'equal' to the closed form; times are held "
    "against gloo on the machine at hand (shardproof bench --costs), for clusters the error is not known: trust "
    "ratios more than seconds",
)
"""What every prediction rests on, and how far it can be trusted."""


def main(arguments: argparse.Namespace) -> int:
    """Predict and tell. Exit status 0; 1 when a dry run's ledger is not the closed form's."""
    cluster = read(arguments.cluster, PRESETS)
    subject: Any = resolve(arguments.subject)
    with ticking(sys.stderr) as tick, DryEngine() as engine:
        told = [predict(text, subject, cluster, engine, world=arguments.world, tick=tick) for text in arguments.cases]
    if arguments.out:
        folder = _write(Path(arguments.out), told)
        show_message(str(folder), sys.stderr)
    if arguments.json:
        print(json.dumps([_as_json(one) for one in told], indent=2, allow_nan=False))
    else:
        for one in told:
            for table in _tables(one):
                show_table(table, sys.stdout)
            show_message(one.fastest, sys.stdout, style="bold")
        show_message(
            "\n".join(["", f"cluster: {cluster.note or 'from a file'}", *ASSUMPTIONS]), sys.stdout, style="dim"
        )
    return 1 if any(row.startswith("differs") for one in told for row in one.rows["ledger"]) else 0


def _seconds(value: object) -> str:
    return tables.NOTHING if _missing(value) else f"{float(str(value)):,.4g}"


def _gibibytes(value: object) -> str:
    return tables.NOTHING if _missing(value) else f"{float(str(value)) / 2**30:,.3g}"


def _missing(value: object) -> bool:
    return value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value))


def _tables(one: Prediction) -> list[Table]:
    rows = one.rows.assign(told=one.rows["ledger"].where(one.rows["ledger"] != "", one.rows["reason"]))
    times = [(name, f"{name}_s", _seconds) for name in ("step", "compute", "exposed", "hidden")]
    kinds = ("parameters", "gradients", "optimizer", "saved", "peak", "wire")
    sizes = [(name, f"{name}_bytes", _gibibytes) for name in kinds]
    head = tables.table(
        f"{one.text} on {one.cluster.name}",
        rows,
        (
            ("case", "words", str),
            ("ranks", "ranks", tables.count),
            *times,
            ("tokens/s/rank", "tokens_per_s_per_rank", tables.whole),
            *sizes,
            ("fits", "fits", tables.mark),
            ("calls", "calls", tables.count),
            ("ledger, or why not", "told", str),
        ),
        note="one step; s and GiB of a rank; wire: ring model; ledger: that of the dry run beside the closed form",
    )
    phases = tables.table(
        "Where communication goes",
        one.phases,
        (("case", "words", str), ("phase", "phase", str), ("exposed s", "exposed_s", _seconds))
        + (("hidden s", "hidden_s", _seconds),),
        note="one step; exposed: the rank waits; hidden: it computes meanwhile",
    )
    more = [tables.break_even_table(one.crossings)] if len(one.crossings) else []
    return [_right(head, 1), _right(phases, 2), *more]


def _right(table: Table, first: int) -> Table:
    """The same table with its numbers aligned right: all columns from `first` on that hold no words."""
    numbers = [i for i, header in enumerate(table.headers) if i >= first and header not in ("fits", _WHY)]
    return Table(title=table.title, headers=table.headers, rows=table.rows, numbers=frozenset(numbers), note=table.note)


_WHY = "ledger, or why not"


def _as_json(one: Prediction) -> dict[str, object]:
    return {
        "case": one.text,
        "cluster": one.cluster.name,
        "algorithm": one.cluster.algorithm,
        "fastest": one.fastest,
        "candidates": _records(one.rows),
        "phases": _records(one.phases),
        "break_even": _records(one.crossings),
        "assumptions": [one.cluster.note, *ASSUMPTIONS],
    }


def _records(frame: pd.DataFrame) -> list[dict[str, object]]:
    known = frame.astype("object").where(frame.notna(), None)
    return [{str(key): value for key, value in row.items()} for row in known.to_dict("records")]


def _write(out: Path, told: Sequence[Prediction]) -> Path:
    """A folder with predict.json, predict.csv, predict.html (tables and plots) and the ledgers of single cases."""
    folder = out / f"{datetime.datetime.now().strftime('%Y%m%d-%H%M%S-%f')}-predict"
    try:
        folder.mkdir(parents=True)
        (folder / "predict.json").write_text(json.dumps([_as_json(one) for one in told], indent=2) + "\n", "utf-8")
        pd.concat([one.rows for one in told]).to_csv(folder / "predict.csv", index=False, lineterminator="\n")
        (folder / "predict.html").write_text(_page(told), "utf-8")
        events = [event for one in told for forecast in one.forecasts for event in forecast.events]
        ledger = pd.DataFrame([[getattr(event, name) for name in COLUMNS] for event in events], columns=list(COLUMNS))
        ledger.to_csv(folder / "ledger.csv", index=False, lineterminator="\n")
    except OSError as problem:
        reason = problem.strerror or str(problem)
        raise RequestError(
            f"out={out}: cannot be written ({reason}); legal: a folder with write permission"
        ) from problem
    return folder


def _page(told: Sequence[Prediction]) -> str:
    from reports import plots  # noqa: PLC0415  (matplotlib takes a second to import, and only a folder needs it)

    parts = ['<!doctype html><meta charset="utf-8"><title>shardproof predict</title>']
    for one in told:
        parts += [f"<pre>{html.escape(plain(table))}</pre>" for table in _tables(one)]
        parts += [f"<p>{html.escape(one.fastest)}</p>"]
        for way, curve in one.curves.items():
            crossings = one.crossings[one.crossings["counted"] == way]
            parts.append(plots.break_even(curve, crossings, f"Break-even of {one.text}, counted: {way}"))
    return "\n".join([*parts, *(f"<p>{html.escape(line)}</p>" for line in ASSUMPTIONS)]) + "\n"
