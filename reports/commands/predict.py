"""`shardproof predict`: time, memory and bytes of cases on a cluster that is not here; which mode, and from where on.

The numbers are the harness's (harness.predicting.forecast); here they are laid out and printed, with what they assume.
"""

import argparse
import datetime
import html
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from shardproof.harness.engines.shapes.dry import DryEngine
from shardproof.harness.errors import RequestError
from shardproof.harness.ledger import COLUMNS
from shardproof.harness.predicting.clusters import read
from shardproof.harness.predicting.figures import DEPTHS
from shardproof.harness.subject import named
from shardproof.reports.comparing.growth import break_even_table
from shardproof.reports.predicting import pipelines
from shardproof.reports.predicting.answers import step_words
from shardproof.reports.predicting.loads import load_tables
from shardproof.reports.predicting.prediction import Prediction, predict, together
from shardproof.reports.printing.text import plain, show_message, show_table, show_words, ticking
from shardproof.reports.printing.text_tables import Table, count, gibibytes, mark, records, seconds, table

ASSUMPTIONS = (
    "compute: FLOPs of matrix products and attention as the dry run counts them (masked pairs too), over peak x "
    "efficiency of the device; element-wise work, the optimizer's and launch times are left out",
    "communication: the alpha-beta model of every call, ring and tree, over the links between the ranks of its group; "
    "all ranks come at once, groups and links do not disturb each other",
    "pipelines: one rank of every kind of stage is run and taken apart; every stage plays its own program, "
    "computations at the times of its kind, messages at the cost of a call, and a batch of messages holds up its rank "
    "until all of it has arrived; what follows the last backward comes after it; memory of the largest stage, time of "
    "the one that computes longest",
    "overlap: what the program itself does between issuing a call and waiting for it; a call that it waits for at once "
    "is exposed, the sum of all gradients after backward among them",
    "memory: all that the program's tensors hold; allocator, contexts and libraries come on top. Where the case says "
    "no optimizer=, gradients, masters and moments are by Megatron-LM's formula for AdamW (dist_optimizer.md), split "
    "over data ranks as zero= says (zero=1: 6 + 12/d bytes a parameter); where it does, they are the program's own",
    "names: FSDP (ZeRO-3, FSDP2) is zero=3, with parameters kept after the forward zero=2, HSDP with shard=; "
    "Megatron's distributed optimizer is zero=1; mode=isp gathers weights for each use too",
    "gradients travel in the dtype of the case, as in the ledger; with grad_dtype=float32 in twice those bytes",
    f"deep models: memory and times are the straight line through {DEPTHS[0]} and {DEPTHS[1]} layers; micro-batches "
    "between the first and the last are alike",
    "errors: calls, bytes and parameters are exact where the ledger is 'equal' to the closed form; times are held "
    "against gloo on the machine at hand (python -m bench.cost_table), for clusters the error is not known: trust "
    "ratios more than seconds",
)
"""Assumptions of every prediction, and how far it can be trusted."""


def main(arguments: argparse.Namespace) -> int:
    """Predict and print. Exit status 0; 1 when a dry run's ledger is not the closed form's."""
    cluster = read(arguments.cluster)
    subject = named(arguments.subject).call
    with ticking(sys.stderr) as tick, DryEngine() as engine:
        search = {"world": arguments.world, "suggest": arguments.suggest}
        predictions = [predict(text, subject, cluster, engine, **search, tick=tick) for text in arguments.cases]
    if arguments.out:
        folder = _write(Path(arguments.out), predictions)
        show_message(str(folder), sys.stderr)
    if arguments.json:
        print(json.dumps([_as_json(one) for one in predictions], indent=2, allow_nan=False))
    else:
        one = together(predictions) if len(predictions) > 1 else predictions[0]
        show_words(f"{one.fastest}\n", sys.stdout, style="bold")
        for table in [*_tables(one), *(own for text in predictions if text is not one for own in _own(text))]:
            show_table(table, sys.stdout)
        show_words("\n".join(["", f"cluster: {cluster.note or 'from a file'}", *ASSUMPTIONS]), sys.stdout, style="dim")
    return 1 if any(row.startswith("differs") for one in predictions for row in one.rows["ledger"]) else 0


_DETAILED = 8
"""Candidates whose phases are shown."""


def _tables(prediction: Prediction) -> list[Table]:
    """The answer's table first, then where memory and time go; the break-even of modes where there are several."""
    ledger_or_reason = prediction.rows["ledger"].where(prediction.rows["ledger"] != "", prediction.rows["reason"])
    rows = prediction.rows.assign(ledger_or_reason=ledger_or_reason)
    legal = rows[rows["legal"] == "yes"]
    shown = prediction.phases[prediction.phases["words"].isin(legal["words"].head(_DETAILED))]
    return [_answer(prediction, rows), *_own(prediction), _memory(legal), _times(legal), _phases(shown)]


def _own(prediction: Prediction) -> list[Table]:
    """Tables of one text alone: its stages, the break-even of its modes, what is beside."""
    tables = _stages(prediction) if len(prediction.stages) else []
    tables += load_tables(prediction.loads, prediction.calls)
    tables += [break_even_table(prediction.crossings)] if len(prediction.crossings) else []
    beside = table("Beside", prediction.beside, (str, "what | how much"), note=_BESIDE)
    return [*tables, beside] if len(prediction.beside) else tables


_BESIDE = (
    "what the system itself counts, and calls of its step that change no number and are no part of the ledger above"
)
_PARTS = " | ".join(f"{name}: {name}_bytes" for name in ("parameters", "gradients", "optimizer", "saved", "peak"))
"""Columns of the memory of a GPU."""


def _answer(prediction: Prediction, rows: pd.DataFrame) -> Table:
    states = prediction.states or "the program's own optimizer"
    return table(
        f"{prediction.text} on {prediction.cluster.name}",
        rows,
        (str, "case: words"),
        (mark, "fits"),
        (seconds, "tokens/s/GPU: tokens_per_s_per_rank | tokens/s: tokens_per_s"),
        (count, "GPUs: ranks"),
        (seconds, "step s: step_s"),
        (gibibytes, "needs GiB: peak_bytes"),
        (str, "why not first: lost" if any(rows["lost"]) else ""),
        (str, "ledger, or why not: ledger_or_reason"),
        note=f"{step_words(rows)}{states}; fastest first, what does not fit by its memory; why not first: time of a "
        "GPU for a token beside the first one's; ledger: that of the dry run beside the closed form",
    )


def _stages(prediction: Prediction) -> list[Table]:
    """Memory by part, then times and bytes, of every stage."""
    assert prediction.pipeline is not None
    memory = table(
        "Memory of every stage",
        prediction.stages,
        (str, "stage | layers | in flight: live"),
        (gibibytes, _PARTS),
        note="GiB of a GPU; in flight: the most micro-batches that are forward and not yet backward"
        + " (of one chunk each)" * any(span.action.chunk for own in prediction.pipeline.spans for span in own),
    )
    bubble, stated = prediction.pipeline.bubble, prediction.pipeline.bubble_stated
    formula = "none is known" if stated is None else f"{stated:.2%}"
    times = table(
        "Time and messages of every stage",
        prediction.stages,
        (str, "stage | layers"),
        (seconds, " | ".join(f"{name} s: {name}_s" for name in ("forward", "backward", "compute", "hidden", "wait"))),
        (count, "messages"),
        (gibibytes, "messages GiB: message_bytes | wire GiB: wire_bytes"),
        (str, "ledger"),
        note=f"bubble: {bubble:.2%} of the stages' time; closed form for equal stages and messages that take "
        f"no time: {formula}; forward, backward: of one micro-batch; the rest of a step; messages: sent to other "
        "stages; one rank of each kind of stage is run",
    )
    return [memory, times]


def _memory(legal: pd.DataFrame) -> Table:
    return table(
        "Memory of a GPU",
        legal,
        (str, "case: words"),
        (gibibytes, _PARTS),
        note="GiB; saved: for backward; peak: all tensors at once, with those that live for a moment",
    )


def _times(legal: pd.DataFrame) -> Table:
    return table(
        "Time of a step",
        legal,
        (str, "case: words"),
        (count, "calls"),
        (gibibytes, "wire GiB: wire_bytes"),
        (seconds, "compute s: compute_s | exposed s: exposed_s | hidden s: hidden_s"),
        note="calls and wire bytes (ring model) of a GPU; exposed: it waits for a call; hidden: it computes meanwhile",
    )


def _phases(shown: pd.DataFrame) -> Table:
    return table(
        "Where communication goes",
        shown,
        (str, "case: words | phase"),
        (seconds, "exposed s: exposed_s | hidden s: hidden_s"),
        note=f"of {_DETAILED} candidates at most, the first ones above",
    )


def _as_json(prediction: Prediction) -> dict[str, object]:
    frames = {"candidates": prediction.rows, "phases": prediction.phases, "break_even": prediction.crossings}
    frames |= {name: getattr(prediction, name) for name in ("beside", "stages", "loads", "calls")}
    return {
        "case": prediction.text,
        "cluster": prediction.cluster.name,
        "algorithm": prediction.cluster.algorithm,
        "fastest": prediction.fastest,
        **{name: records(frame) for name, frame in frames.items()},
        "assumptions": [prediction.cluster.note, *ASSUMPTIONS],
    }


def _write(out: Path, predictions: Sequence[Prediction]) -> Path:
    """A folder with predict.json, predict.csv, predict.html (tables and plots), ledger.csv of the forecasts that keep
    events, and trace.json, trace-1.json, ... of the pipelines.
    """
    folder = out / f"{datetime.datetime.now().strftime('%Y%m%d-%H%M%S-%f')}-predict"
    try:
        folder.mkdir(parents=True)
        (folder / "predict.json").write_text(
            json.dumps([_as_json(one) for one in predictions], indent=2) + "\n", "utf-8"
        )
        pd.concat([one.rows for one in predictions]).to_csv(folder / "predict.csv", index=False, lineterminator="\n")
        (folder / "predict.html").write_text(_page(predictions), "utf-8")
        staged = [one.pipeline for one in predictions if one.pipeline]
        for number, one in enumerate(staged):
            pipelines.write_trace(one, folder / (f"trace-{number}.json" if number else "trace.json"))
        events = [event for one in predictions for forecast in one.forecasts for event in forecast.events]
        ledger = pd.DataFrame([[getattr(event, name) for name in COLUMNS] for event in events], columns=list(COLUMNS))
        ledger.to_csv(folder / "ledger.csv", index=False, lineterminator="\n")
    except OSError as problem:
        reason = problem.strerror or str(problem)
        raise RequestError(
            f"out={out}: cannot be written ({reason}); legal: a folder with write permission"
        ) from problem
    return folder


def _page(predictions: Sequence[Prediction]) -> str:
    from shardproof.reports.pages import plots  # noqa: PLC0415  (matplotlib takes a second to import, and only a folder needs it)

    parts = ['<!doctype html><meta charset="utf-8"><title>shardproof predict</title>']
    for prediction in predictions:
        parts += [f"<p><b>{html.escape(prediction.fastest)}</b></p>"]
        parts += [f"<pre>{html.escape(plain(table))}</pre>" for table in _tables(prediction)]
        if prediction.pipeline is not None:
            parts.append(plots.pipeline(pipelines.spans(prediction.pipeline), f"One step of {prediction.text}"))
        for way, curve in prediction.curves.items():
            crossings = prediction.crossings[prediction.crossings["counted"] == way]
            parts.append(plots.break_even(curve, crossings, f"Break-even of {prediction.text}, counted: {way}"))
    return "\n".join([*parts, *(f"<p>{html.escape(line)}</p>" for line in ASSUMPTIONS)]) + "\n"
