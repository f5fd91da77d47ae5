"""The pipeline of a prediction as frames and as a trace: memory, times and bytes of every stage, and when it computes.

Sizes are bytes, times seconds.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from shardproof.harness.predicting.figures import Forecast

_PARTS = ("parameters", "gradients", "optimizer", "saved", "peak")


def stages(forecast: Forecast) -> pd.DataFrame:
    """A row for every stage: stage, layers, live, the parts of its memory, the times of a step, what it sends, ledger.

    `live` are micro-batches in flight (of a chunk each), forward_s and backward_s those of one micro-batch, wait_s its
    time of waiting in a step. messages go to its neighbours. Missing where the subject states no closed form.
    """
    return pd.DataFrame(
        [
            {
                "stage": stage.index,
                "layers": stage.layers,
                "live": stage.live,
                **{f"{part}_bytes": getattr(stage.memory, part) for part in _PARTS},
                "forward_s": stage.forward_s,
                "backward_s": stage.backward_s,
                "compute_s": stage.times.compute_s,
                "hidden_s": sum(stage.times.hidden_s.values()),
                "wait_s": stage.idle_s,
                "messages": sent.messages if (sent := stage.traffic) else None,
                "message_bytes": sent.message_bytes if sent else None,
                "wire_bytes": sent.wire_bytes if sent else None,
                "ledger": stage.ledger,
                "run_as_rank": stage.run,
            }
            for stage in forecast.stages
        ]
    )


def spans(forecast: Forecast) -> pd.DataFrame:
    """stage, kind ("F", "B"), micro, chunk, start_s, end_s of every computation, in order."""
    rows = [
        (stage, str(span.action.kind), span.action.micro, span.action.chunk, float(span.start), float(span.end))
        for stage, own in enumerate(forecast.spans)
        for span in own
    ]
    return pd.DataFrame(rows, columns=["stage", "kind", "micro", "chunk", "start_s", "end_s"])


def write_trace(forecast: Forecast, path: Path) -> None:
    """Write the step as Chrome/Perfetto JSON, a process for every stage. Times there are microseconds."""
    path.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": list(_events(forecast))}) + "\n", "utf-8")


def _events(forecast: Forecast) -> Iterator[dict[str, Any]]:
    drawn = spans(forecast)
    for stage in forecast.stages:
        about = {"name": f"stage {stage.index}: {stage.layers} layers", "sort_index": stage.index}
        for what, value in about.items():
            yield {"ph": "M", "name": f"process_{what}", "pid": stage.index, "tid": 0, "args": {what: value}}
        own = drawn[drawn["stage"] == stage.index].to_dict("records")
        ended_s = 0.0
        for row in own:
            if row["start_s"] > ended_s:
                yield _slice(stage.index, "waits", ended_s, row["start_s"], {})
            arguments = {key: row[key] for key in ("micro", "chunk")}
            name = "forward" if row["kind"] == "F" else "backward"
            yield _slice(stage.index, f"{name} {row['micro']}", row["start_s"], row["end_s"], arguments)
            ended_s = row["end_s"]
        rest_s = stage.times.total_s - stage.idle_s - sum(row["end_s"] - row["start_s"] for row in own)
        yield _slice(stage.index, "after the last backward", ended_s, ended_s + rest_s, {})


def _slice(stage: int, name: str, start_s: float, end_s: float, arguments: dict[str, Any]) -> dict[str, Any]:
    times = {"ts": start_s * 1e6, "dur": (end_s - start_s) * 1e6}
    return {"ph": "X", "name": name, "pid": stage, "tid": 0, **times, "args": arguments}
