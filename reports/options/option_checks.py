"""Options checked before anything runs: text to read, an experiment, witnesses, a file to write.

The experiment `gpt3-857m-tp4` repeats a walk through Megatron-LM with the torch profiler: 4 ranks, TP=4, fp16, dynamic
loss scaling. On a GPU the model has its real sizes; on a CPU everything is smaller and the counts per layer are the
same. Steps of --profile-steps count from 0; FIRST:END are those from FIRST on, END not included.
"""

import argparse
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shardproof.harness.dense_model import SUBJECT, dense_model
from shardproof.harness.errors import RequestError
from shardproof.harness.protocols import CaseLike
from shardproof.harness.traces.nsys_export import on_gpus


def with_data(cases: Sequence[CaseLike], path: str | None) -> tuple[CaseLike, ...]:
    """The cases with this text, if any, as their data. Raises RequestError where the case language has no such path."""
    try:
        return tuple(cases) if path is None else tuple(case.but(data=path) for case in cases)
    except ValueError as problem:
        raise RequestError(str(problem)) from problem


def check_data(path: str) -> None:
    """Raise RequestError for data that are not there; they are read when the cases are known."""
    try:
        dense_model().find_data(Path(path).expanduser())
    except (ValueError, RuntimeError) as problem:
        raise RequestError(f"data={path}: {problem}") from problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """Cases of an experiment on a GPU and on a CPU, its subject, and the calls of the published walk: (phase, part).

    `steps` are those that witnesses watch, FIRST:END: the walk profiled three steps after a warm-up, 110 to 112.
    """

    subject: str
    full: str
    small: str
    steps: str
    named: frozenset[tuple[str, str]]


EXPERIMENTS = {
    "gpt3-857m-tp4": Experiment(
        subject=SUBJECT,
        full="preset=gpt3-857m mode=tp tp=4 dtype=float16 master=float32 scaler=dynamic steps=5 lr=6e-5 clip=1.0",
        small="preset=gpt3-857m mode=tp tp=4 dtype=float16 master=float32 scaler=dynamic steps=5 lr=6e-5 clip=1.0 "
        "layers=4 hidden=64 ffn=256 vocab=509 seq=32",
        steps="2:5",
        named=frozenset({("data", ""), ("forward", "embedding"), ("forward", "attention.wo"), ("forward", "mlp.w2")}),
    )
}


def complete_experiment(arguments: argparse.Namespace) -> None:
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


TOOLS = ("torch", "nsys")


def profiled_tools(arguments: argparse.Namespace) -> tuple[str, ...]:
    """The tools of --profile, each once. Raises RequestError for an unknown one, or if there is nothing to profile."""
    if arguments.profile is None:
        return ()
    tools = tuple(dict.fromkeys(word for word in arguments.profile.split(",") if word))
    if not tools:
        raise RequestError(f"profile={arguments.profile}: names no witness; legal: {','.join(TOOLS)}")
    for tool in tools:
        if tool not in TOOLS:
            raise RequestError(f"profile={tool}: is not a witness; legal: {','.join(TOOLS)}")
    if arguments.engine == "dry":
        raise RequestError("profile: dry ranks have shapes and no times; legal: --engine inproc")
    return tools


def profiled_steps(arguments: argparse.Namespace, cases: Sequence[CaseLike]) -> range | None:
    """The steps of --profile-steps, None for all. Raises RequestError unless every case has them."""
    word = arguments.profile_steps
    if word is None:
        return None
    if not arguments.profile:
        rule = "chooses among the steps that --profile watches, and there is no --profile"
        raise RequestError(f"profile-steps={word}: {rule}; legal: --profile torch --profile-steps 0:1")
    shortest = min(cases, key=lambda case: case.steps, default=None)
    legal = f"legal: 0:{shortest.steps if shortest else 1}"
    if not (found := re.fullmatch(r"([0-9]{1,9}):([0-9]{1,9})", word)):
        raise RequestError(f"profile-steps={word}: must be FIRST:END, steps from FIRST on, END not included; {legal}")
    steps = range(int(found[1]), int(found[2]))
    if not steps:
        raise RequestError(f"profile-steps={word}: holds no step, for END is not included; {legal}")
    if shortest and steps.stop > shortest.steps:
        has = f"{shortest.steps} step{'s' if shortest.steps > 1 else ''}, counted from 0"
        raise RequestError(f"profile-steps={word}: case {str(shortest)!r} has {has}; {legal}")
    return steps


def check_target(file: str) -> None:
    """Raise RequestError unless a file can be written there, before minutes are spent on it; leave no new one."""
    fresh = not os.path.lexists(file)
    with check_writing(file):
        # Not blocking: a pipe without a reader is an error and no endless wait.
        os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK, 0o666))
        if fresh:
            os.unlink(file)


@contextmanager
def check_writing(file: str) -> Iterator[None]:
    """Write there. Raises RequestError, naming the file and the reason, when the system refuses."""
    try:
        yield
    except OSError as problem:
        reason = problem.strerror or str(problem)
        legal = "a file in a folder with write permission"
        raise RequestError(f"emit-repro={file}: cannot be written ({reason}); legal: {legal}") from problem
