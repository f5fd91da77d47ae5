"""The options of recording, the same for `shardproof record` and `python -m shardproof.record`."""

from __future__ import annotations

import argparse

from harness.errors import RequestError
from harness.programs.session import Options, silence_of, steps_of, tools_of

__all__ = ["add_options", "request_of"]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add them to a parser; what follows them is the program."""
    parser.add_argument("--steps", metavar="FIRST:END", help="record these steps; END is not included (all)")
    parser.add_argument("--profile", metavar="torch,nsys", help="profilers to run beside; torch needs --steps")
    parser.add_argument(
        "--silence",
        default="60",
        metavar="SECONDS",
        help="after how long without any event a rank writes down where it stands, for `shardproof hang` (60)",
    )
    parser.add_argument("--out", default="runs", metavar="DIR", help="where run folders go (runs)")


def request_of(arguments: argparse.Namespace, *, wraps: bool) -> Options:
    """The options of these arguments. Raises RequestError for a wrong one, and for nsys unless a command is wrapped."""
    steps = steps_of(arguments.steps)
    profile = tools_of(arguments.profile, steps)
    if "nsys" in profile and not wraps:
        rule = "Nsight Systems must start the whole command"
        raise RequestError(f"profile=nsys: {rule}; legal: shardproof record --profile nsys -- torchrun ... train.py")
    return {"steps": steps, "profile": profile, "silence_s": silence_of(arguments.silence)}
