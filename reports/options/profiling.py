"""What --profile and --profile-steps request: the witnesses, and the steps of every run that they watch.

Steps count from 0; FIRST:END are those from FIRST on, END not included.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

from harness.errors import RequestError
from harness.protocols import CaseLike

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
