"""The markers of our tests, for sessions whose ini file is not ours: there pytest warns of every unknown one."""

from __future__ import annotations

__all__ = ["MARKERS", "OF_THE_SUITES"]

MARKERS = (
    "mode(name): the parallel mode a test is about",
    "world(n): the number of ranks a test runs",
    "gpu: needs a CUDA device",
    "slow: more than ten seconds",
    "peers: needs the extra `peers`",
)
"""What pyproject.toml registers as well, for the tests that lie beside the suites."""
OF_THE_SUITES = (
    "inproc: runs what cannot be sent to other processes, so ranks must be threads of this one",
    "faults: disturbs the subject's collectives; deselected without --faults",
    "ours: about the implementation in `parallel`; deselected when another subject is under test",
    "own_cases: proves cases of its own or none, so it is skipped with --case",
)
"""What needs the suites' own conftest."""
