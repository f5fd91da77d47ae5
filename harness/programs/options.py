"""The options of recording, the same for `shardproof record` and `python -m shardproof.record`."""

from __future__ import annotations

import argparse

from harness.errors import RequestError
from harness.programs.session import Options, silence_of, steps_of, tools_of
from harness.programs.stated import stated


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add them to a parser; what follows them is the program."""
    parser.add_argument("--steps", metavar="FIRST:END", help="record these steps; END is not included (all)")
    parser.add_argument(
        "--profile",
        metavar="torch,nsys,et",
        help="profilers to run beside; et: torch's execution traces, and what follows from them; torch and et need "
        "--steps",
    )
    parser.add_argument("--tokens", metavar="N", help="tokens of all ranks in a step, for tokens a second")
    parser.add_argument("--cluster", metavar="NAME|FILE", help="the machine's links, to hold bandwidth against them")
    parser.add_argument("--case", metavar="WORDS", help="the layout as a case, to hold calls, bytes and time against")
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
    words = stated(arguments.tokens, arguments.cluster, arguments.case)
    return {"steps": steps, "profile": profile, "silence_s": silence_of(arguments.silence), "stated": words}
