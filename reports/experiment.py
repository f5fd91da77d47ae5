"""Experiments by name: a case, a subject and witnesses that repeat a published run, and the list that it is about.

`gpt3-857m-tp4` repeats a walk through Megatron-LM with the torch profiler: 4 ranks, TP=4, fp16, dynamic loss scaling.
On a GPU the model has its real sizes; on a CPU everything is smaller and the counts per layer are the same. The walk
names broadcasts and the all-reduces of embedding, linear_proj and linear_fc2; the table says which ones it leaves out.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass

import pandas as pd

from harness.errors import RequestError
from harness.witnesses.nsys import on_gpus
from reports.frames import Run
from reports.tables import NOTHING, Table, count, mebibytes

__all__ = ["EXPERIMENTS", "Experiment", "asked", "real_size", "timeline"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """What is run on a GPU and on a CPU, on which subject, and which calls the published walk names: (phase, part).

    `steps` are those that witnesses watch, FIRST:END: the walk profiled three steps after a warm-up, 110 to 112.
    """

    subject: str
    full: str
    small: str
    steps: str
    named: frozenset[tuple[str, str]]


EXPERIMENTS = {
    "gpt3-857m-tp4": Experiment(
        subject="parallel.scaled:subject",
        full="preset=gpt3-857m mode=tp tp=4 dtype=float16 steps=5 lr=6e-5 clip=1.0",
        small="preset=gpt3-857m mode=tp tp=4 dtype=float16 steps=5 lr=6e-5 clip=1.0 "
        "layers=4 hidden=64 ffn=256 vocab=509 seq=32",
        steps="2:5",
        named=frozenset({("data", ""), ("forward", "embedding"), ("forward", "attention.wo"), ("forward", "mlp.w2")}),
    )
}
MEGATRON = {
    "embedding": "word_embeddings",
    "attention.wqkv": "linear_qkv",
    "attention.wo": "linear_proj",
    "mlp.w1": "linear_fc1",
    "mlp.w2": "linear_fc2",
    "head": "output_layer",
}
"""What Megatron-Core calls our modules."""


def asked(arguments: argparse.Namespace) -> None:
    """Fill in what the experiment of --preset-experiment says. Raises RequestError for an unknown or mixed request."""
    name = arguments.preset_experiment
    if not name:
        return
    if name not in EXPERIMENTS:
        raise RequestError(f"preset-experiment={name}: is not known; legal: {' '.join(EXPERIMENTS)}")
    if arguments.cases:
        raise RequestError(f"preset-experiment={name}: brings its own case, and a CASE was given; legal: one of them")
    experiment = EXPERIMENTS[name]
    arguments.cases = [experiment.full if arguments.device == "cuda" else experiment.small]
    arguments.subject = experiment.subject
    arguments.profile = arguments.profile or "torch,nsys"
    if arguments.profile_steps is None:
        arguments.profile_steps = experiment.steps


def real_size(name: str) -> str:
    """The command that repeats the experiment at its real size on a node with GPUs."""
    return f"at its real size: shardproof run --preset-experiment {name} --device cuda; {on_gpus()}"


def timeline(run: Run, name: str) -> Table:
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
        told = "yes" if (phase, part) in named else "no"
        module = MEGATRON.get(str(part), NOTHING)
        payload = mebibytes(int(calls["payload_bytes"].sum()))
        rows.append((str(phase), str(op), str(part) or NOTHING, module, count(len(calls)), payload, told, at + more))
    return Table(
        title="One micro-batch and the end of its step, rank 0, in order",
        headers=("phase", "op", "module", "in Megatron", "calls", "MiB", "in the walk", "at, ms"),
        rows=tuple(rows),
        numbers=frozenset({4, 5}),
        note="at: start of the first calls, from the first of these; in the walk: whether the published text names it",
    )
