"""The table of a published run that was repeated (`--preset-experiment`)."""

import re

import pandas as pd

from shardproof.reports.options.option_checks import EXPERIMENTS
from shardproof.reports.printing.text_tables import NOTHING, Table, byte_size, count
from shardproof.reports.stored.frames import Run

MEGATRON = {
    "embedding": "word_embeddings",
    "attention.wqkv": "linear_qkv",
    "attention.wo": "linear_proj",
    "mlp.w1": "linear_fc1",
    "mlp.w2": "linear_fc2",
    "head": "output_layer",
}
"""Names of our modules in Megatron-Core."""


def experiment_table(run: Run, name: str) -> Table:
    """The calls of one micro-batch and of the step around it on rank 0, in order, same parts of layers together."""
    ledger = run.ledger
    last = ledger[(ledger["rank"] == 0) & (ledger["step"] == ledger["step"].max())]
    inner = last[~last["phase"].isin(["grad_sync", "step", "metric"])]
    outer = last[last["phase"].isin(["grad_sync", "step", "metric"])]
    one = pd.concat([inner[inner["microbatch"] == inner["microbatch"].max()], outer]).sort_values("call_index")
    parts = one["region"].astype(str).map(lambda region: re.sub(r"^layers\.\d+\.", "", region))
    one = one.assign(part=parts, phase=one["phase"].astype(str), op=one["op"].astype(str))
    rows = []
    named = EXPERIMENTS[name].named
    first_us = float(one["start_us"].min())
    for (phase, part, op), calls in one.groupby(["phase", "part", "op"], sort=False):
        at = ", ".join(f"{(float(start) - first_us) / 1e3:.1f}" for start in calls["start_us"].head(4))
        more = " ..." if len(calls) > 4 else ""
        stated = "yes" if (phase, part) in named else "no"
        module = MEGATRON.get(str(part), NOTHING)
        payload = byte_size(int(calls["payload_bytes"].sum()))
        rows.append((str(phase), str(op), str(part) or NOTHING, module, count(len(calls)), payload, stated, at + more))
    return Table(
        title="One micro-batch and the end of its step, rank 0, in order",
        headers=("phase", "op", "module", "in Megatron", "calls", "payload", "in the walk", "at, ms"),
        rows=tuple(rows),
        numbers=frozenset({4, 5}),
        note="at: start of the first calls, from the first of these; in the walk: whether the published text names it",
    )
