"""Frames and tables of a prediction: memory and bytes of every stage, and how both change with the load of experts.

A load is the words of a case that say where tokens go. The predicted rank is the first of its stage, which holds the
experts that a skew loads. No other rank computes, keeps or returns more rows. Sizes are bytes.
"""

import re
from collections import Counter
from collections.abc import Mapping

import pandas as pd

from shardproof.harness.predicting.figures import Forecast, Traffic
from shardproof.reports.printing.text_tables import Table, count, gibibytes, table
from shardproof.reports.stored.frames import LAYER_NUMBER

PARTS = ("parameters", "gradients", "optimizer", "saved", "peak")
"""Parts of a rank's memory, and the most that all tensors hold at once."""


def rows_of_stages(forecast: Forecast) -> pd.DataFrame:
    """A row for every stage: its layers, the parts of its memory, what its first rank sends, and how the ledger of its
    dry run compares with the closed form.

    `live` counts the micro-batches in flight, each of one chunk. `messages` go to neighbouring stages. Columns of calls
    are empty where the subject states no closed form.
    """
    return pd.DataFrame(
        [
            {
                "stage": stage.index,
                "layers": stage.layers,
                "live": stage.live,
                **{f"{part}_bytes": getattr(stage.memory, part) for part in PARTS},
                "messages": sent.messages if (sent := stage.traffic) else None,
                "message_bytes": sent.message_bytes if sent else None,
                "wire_bytes": sent.wire_bytes if sent else None,
                "ledger": stage.ledger,
                "run_as_rank": stage.run,
            }
            for stage in forecast.stages
        ]
    )


CALL = ["stages", "phase", "module", "op", "axis", "ranks"]
"""Columns that distinguish the calls of a stage."""


def memory_by_load(by_load: Mapping[str, Forecast]) -> pd.DataFrame:
    """The rows of `rows_of_stages` for each load; an empty frame if there is only one stage."""
    frames = [rows_of_stages(one).assign(load=load) for load, one in by_load.items() if one.stages]
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def calls_by_load(by_load: Mapping[str, Forecast]) -> pd.DataFrame:
    """The calls of one rank in a step, for each load and for stages that issue the same calls ("1-14").

    Layers are written as "layers.*". The frame is empty where the subject states no closed form of all fields.
    """
    rows = [
        (load, stages, *key, calls, size)
        for load, one in by_load.items()
        for stages, sums in _stages_alike(one)
        for key, (calls, size) in sums.items()
    ]
    return pd.DataFrame(rows, columns=["load", *CALL, "calls", "payload_bytes"])


_Sums = dict[tuple[str, str, str, str, int], tuple[int, int]]
"""The key is a call's values of CALL without the stages; its value is the number of calls and their bytes."""


def _stages_alike(forecast: Forecast) -> list[tuple[str, _Sums]]:
    """Neighbouring stages that issue the same calls, as "1-14", with these calls."""
    runs: list[tuple[list[int], _Sums]] = []
    each = [(stage.index, stage.traffic) for stage in forecast.stages] or [(0, forecast.traffic)]
    for index, sent in each:
        sums = _sum_calls(sent) if sent else {}
        if runs and runs[-1][1] == sums:
            runs[-1][0].append(index)
        else:
            runs.append(([index], sums))
    return [(str(own[0]) if len(own) == 1 else f"{own[0]}-{own[-1]}", sums) for own, sums in runs]


def _sum_calls(sent: Traffic) -> _Sums:
    counted, sizes = Counter[tuple[str, str, str, str, int]](), Counter[tuple[str, str, str, str, int]]()
    for line, number in sent.lines.items():
        module = re.sub(LAYER_NUMBER, "*", line.region) or "no module"
        key = line.phase, module, line.op, line.axis, line.group_size
        counted[key] += number
        sizes[key] += number * line.payload_bytes
    return {key: (counted[key], sizes[key]) for key in counted}


_BUSIEST = "of a step, on the rank of a stage that holds the experts which a skew loads"


def load_tables(memory: pd.DataFrame, calls: pd.DataFrame) -> list[Table]:
    """Tables of `memory_by_load`, if there are several loads, and of `calls_by_load`, with columns for every load."""
    made = []
    loads = [str(load) for load in dict.fromkeys(calls["load"])]
    if len(memory) and len(loads) > 1:
        sizes = memory[["stage", "layers"]].drop_duplicates()
        for load, of_load in memory.groupby("load"):
            named = {f"{part}_bytes": f"{part}_bytes {load}" for part in ("saved", "peak")}
            sizes = sizes.merge(of_load.rename(columns=named)[["stage", *named.values()]], on="stage")
        names = " | ".join(
            f"{part} {_short_load(load)}: {part}_bytes {load}" for part in ("saved", "peak") for load in loads
        )
        title, note = "Memory of every stage by load", f"GiB; {_BUSIEST}"
        made.append(table(title, sizes, (str, "stage | layers"), (gibibytes, names), note=note))
    if len(calls):
        order = calls[[*CALL, "calls"]].drop_duplicates()
        sent = calls.pivot(index=[*CALL, "calls"], columns="load", values="payload_bytes").reset_index()
        shown = order.merge(sent, how="left", on=[*CALL, "calls"]).rename(columns=_short_load)
        columns = (str, " | ".join(CALL)), (count, "calls"), (gibibytes, " | ".join(map(_short_load, loads)))
        note = f"GiB that a rank hands over; {_BUSIEST}"
        made.append(table("Bytes of every stage and call", shown, *columns, note=note))
    return made


def _short_load(load: str) -> str:
    return load.replace("routing=", "")
