"""What a session was asked, held against its rules before anything is collected: one sentence for what breaks one.
And the session's line in pytest's report.

check(config)     raises pytest.UsageError, with which pytest ends with exit status 4
"""

from __future__ import annotations

import pytest
import torch

from harness.claims import claims
from harness.errors import RequestError
from harness.run import known_engine, parse_cases
from suites.options import asked
from suites.prover import chosen_modes, world_sizes

__all__ = ["check", "header"]


def check(config: pytest.Config) -> None:
    """Refuse a wrong option."""
    try:
        known_engine(asked(config, "engine"))
        world_sizes(asked(config, "worlds"))
        _check_device(config)
        if text := asked(config, "case"):
            parse_cases([text])
        chosen_modes(asked(config, "subject"), asked(config, "modes"))
    except RequestError as problem:
        raise pytest.UsageError(str(problem)) from problem


def header(config: pytest.Config) -> str:
    """One line: who is under test, where and how deep; and what of it cannot be."""
    words = [f"{name} {asked(config, name)}" for name in ("subject", "modes", "worlds", "engine")]
    unknown = claims(asked(config, "subject")).unknown
    return "shardproof: " + ", ".join([*words, *(f"without {mode}, which no case can have" for mode in unknown)])


def _check_device(config: pytest.Config) -> None:
    device = asked(config, "device")
    if device not in ("cpu", "cuda"):
        raise RequestError(f"device={device}: must be cpu or cuda; legal: --device cpu")
    if device == "cuda" and asked(config, "faults"):
        raise RequestError(f"device={device}: faults are applied on the CPU; legal: --faults with --device cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise RequestError("device=cuda: this machine offers no CUDA device; legal: --device cpu")
