"""Experiments by name: a case, a subject and witnesses that repeat a published run, and the list that it is about.

`gpt3-857m-tp4` repeats a walk through Megatron-LM with the torch profiler: 4 ranks, TP=4, fp16, dynamic loss scaling.
On a GPU the model has its real sizes; on a CPU everything is smaller and the counts per layer are the same.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from harness.errors import RequestError
from harness.witnesses.nsys import on_gpus


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
        subject="parallel.subject:subject",
        full="preset=gpt3-857m mode=tp tp=4 dtype=float16 master=float32 scaler=dynamic steps=5 lr=6e-5 clip=1.0",
        small="preset=gpt3-857m mode=tp tp=4 dtype=float16 master=float32 scaler=dynamic steps=5 lr=6e-5 clip=1.0 "
        "layers=4 hidden=64 ffn=256 vocab=509 seq=32",
        steps="2:5",
        named=frozenset({("data", ""), ("forward", "embedding"), ("forward", "attention.wo"), ("forward", "mlp.w2")}),
    )
}


def complete(arguments: argparse.Namespace) -> None:
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
