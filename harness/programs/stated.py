"""What the user of a recording knows and the recorder cannot see: tokens of a step, the machine's links, its case.

They stand in `env.json` under `stated`, for the reports. No torch is imported here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from harness.cases import read_case
from harness.errors import RequestError
from harness.predicting.clusters import PRESETS, read

__all__ = ["EXECUTION_SUFFIX", "stated"]

EXECUTION_SUFFIX = ".et.json"
"""How the execution trace of a rank ends, after `traces/rank<r>`."""


def stated(tokens: str | None, cluster: str | None, case: str | None) -> Mapping[str, object]:
    """These words as they stand in `env.json`, without those that are None. Raises RequestError for a wrong one."""
    words: dict[str, object] = {}
    if tokens is not None:
        if not tokens.isdigit() or not 0 < int(tokens) < 10**15:
            rule = "must be the tokens of all ranks in one step, at least 1"
            raise RequestError(f"tokens={tokens}: {rule}; legal: --tokens 4194304")
        words["tokens"] = int(tokens)
    if cluster is not None:
        read(cluster)
        words["cluster"] = cluster if cluster in PRESETS else str(Path(cluster).resolve())
    if case is not None:
        words["case"] = str(read_case(case))
    return words
