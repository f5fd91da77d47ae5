"""`shardproof predict`: memory, calls and bytes of cases of any size, and whether they fit.

The numbers are the harness's (harness.predicting.forecast); here they are laid out and printed, with what they assume.
"""

import argparse
import json
import sys

import pandas as pd

from shardproof.harness.engines.threads.dry import DryEngine
from shardproof.harness.predicting.figures import DEPTHS
from shardproof.harness.subject import resolve_subject
from shardproof.reports.predicting.loads import PARTS, load_tables
from shardproof.reports.predicting.prediction import Prediction, join_predictions, predict_text, step_words
from shardproof.reports.printing.text import show_progress, show_table, show_words
from shardproof.reports.printing.text_tables import Table, count, gibibytes, mark, records, table

ASSUMPTIONS = (
    "pipelines: one rank of every kind of stage is run and taken apart into forwards and backwards; memory of the "
    "largest stage",
    "memory: all that the program's tensors hold; allocator, contexts and libraries come on top. Where the case says "
    "no optimizer=, gradients, masters and moments are by Megatron-LM's formula for AdamW (dist_optimizer.md), split "
    "over data ranks as zero= says (zero=1: 6 + 12/d bytes a parameter); where it does, they are the program's own",
    "names: FSDP (ZeRO-3, FSDP2) is zero=3, with parameters kept after the forward zero=2, HSDP with shard=; "
    "Megatron's distributed optimizer is zero=1; mode=isp gathers weights for each use too",
    "gradients travel in the dtype of the case, as in the ledger; with grad_dtype=float32 in twice those bytes",
    f"deep models: memory is the straight line through {DEPTHS[0]} and {DEPTHS[1]} layers; micro-batches between the "
    "first and the last are alike",
    "errors: calls, bytes and parameters are exact where the ledger is 'equal' to the closed form",
)
"""Assumptions of every prediction, and how far it can be trusted."""


def main(arguments: argparse.Namespace) -> int:
    """Predict and print. Exit status 0; 1 when a dry run's ledger is not the closed form's."""
    subject, memory_gib = resolve_subject(arguments.subject).call, float(arguments.memory)
    with show_progress(sys.stderr) as tick, DryEngine() as engine:
        predictions = [predict_text(text, subject, memory_gib, engine, tick=tick) for text in arguments.cases]
    if arguments.json:
        print(json.dumps([_as_json(one) for one in predictions], indent=2, allow_nan=False))
    else:
        one = join_predictions(predictions) if len(predictions) > 1 else predictions[0]
        show_words(f"{one.answer}\n", sys.stdout, style="bold")
        for table in [
            *_tables_of_answer(one),
            *(own for text in predictions if text is not one for own in _tables_of_one(text)),
        ]:
            show_table(table, sys.stdout)
        show_words("\n".join(["", *ASSUMPTIONS]), sys.stdout, style="dim")
    return 1 if any(row.startswith("differs") for one in predictions for row in one.rows["ledger"]) else 0


def _tables_of_answer(prediction: Prediction) -> list[Table]:
    """The table of the answer, the tables of this one prediction, and the memory of its legal cases."""
    ledger_or_reason = prediction.rows["ledger"].where(prediction.rows["ledger"] != "", prediction.rows["reason"])
    rows = prediction.rows.assign(ledger_or_reason=ledger_or_reason)
    return [_answer_table(prediction, rows), *_tables_of_one(prediction), _memory_table(rows[rows["legal"] == "yes"])]


def _tables_of_one(prediction: Prediction) -> list[Table]:
    """Tables that only the prediction of a single text has: stages, loads of experts, what is beside."""
    tables = [_stages_table(prediction)] if len(prediction.stages) else []
    tables += load_tables(prediction.loads, prediction.calls)
    beside = table("Beside", prediction.beside, (str, "what | how much"), note=_BESIDE)
    return [*tables, beside] if len(prediction.beside) else tables


_BESIDE = (
    "what the system itself counts, and calls of its step that change no number and are no part of the ledger above"
)
_PARTS = " | ".join(f"{name}: {name}_bytes" for name in PARTS)
"""Columns of the memory of a rank."""


def _answer_table(prediction: Prediction, rows: pd.DataFrame) -> Table:
    states = prediction.states or "the program's own optimizer"
    return table(
        f"{prediction.text} in {prediction.memory_gib:g} GiB",
        rows,
        (str, "case: words"),
        (mark, "fits"),
        (count, "ranks"),
        (gibibytes, "needs GiB: peak_bytes"),
        (count, "calls"),
        (gibibytes, "payload GiB: payload_bytes | wire GiB: wire_bytes"),
        (str, "ledger, or why not: ledger_or_reason"),
        note=f"{step_words(rows)}{states}; what needs least first; calls, payload and wire bytes (ring model) of a "
        "rank in a step; ledger: that of the dry run beside the closed form",
    )


def _stages_table(prediction: Prediction) -> Table:
    return table(
        "Memory and messages of every stage",
        prediction.stages,
        (str, "stage | layers | in flight: live"),
        (gibibytes, _PARTS),
        (count, "messages"),
        (gibibytes, "messages GiB: message_bytes | wire GiB: wire_bytes"),
        (str, "ledger"),
        note="GiB of a rank; in flight: the most micro-batches (of one chunk each) that are forward and not yet "
        "backward; messages: sent to other stages; one rank of each kind of stage is run",
    )


def _memory_table(legal: pd.DataFrame) -> Table:
    return table(
        "Memory of a rank",
        legal,
        (str, "case: words"),
        (gibibytes, _PARTS),
        note="GiB; saved: for backward; peak: all tensors at once, with those that live for a moment",
    )


def _as_json(prediction: Prediction) -> dict[str, object]:
    frames = {"candidates": prediction.rows}
    frames |= {name: getattr(prediction, name) for name in ("beside", "stages", "loads", "calls")}
    return {
        "case": prediction.text,
        "memory_gib": prediction.memory_gib,
        "answer": prediction.answer,
        **{name: records(frame) for name, frame in frames.items()},
        "assumptions": ASSUMPTIONS,
    }
