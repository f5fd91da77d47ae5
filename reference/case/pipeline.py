"""What makes the words of a pipeline legal: `pp schedule first_layers last_layers`, and what they go together with.

Stages share layers as in Megatron-Core: those of the first and the last stage where they are stated, the rest evenly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from reference.case.data_parallel import WORDS as _DATA_PARALLEL
from reference.case.modes import mode_of, whose
from reference.errors import CaseError
from reference.groups import PipelineGroup

__all__ = ["SCHEDULES", "WORDS", "problems"]

SCHEDULES = ("gpipe", "1f1b")
WORDS: Mapping[str, Any] = {"schedule": "1f1b", "first_layers": 0, "last_layers": 0}
"""Each word that only several stages have, with its default."""
_SINGLE: Mapping[str, Any] = {**_DATA_PARALLEL, "metric": False, "variant": ""}
"""Words that have no form on several stages yet, with their defaults."""


def problems(v: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Key, the rule that it breaks and a legal value, of every broken rule."""
    pp = v["pp"]
    for key in ("first_layers", "last_layers"):
        if v[key] < 0:
            yield key, "must not be negative", f"{key}=0"
    if pp == 1:
        for key, plain in WORDS.items():
            if v[key] != plain:
                yield key, "is for several pipeline stages, and pp=1 has one", f"{key}={plain}"
        return
    if not mode_of(v).stages:
        yield "pp", f"has a form in mode={whose(lambda one: one.stages)} only, not in mode={v['mode']}", "pp=1"
    for key, plain in _SINGLE.items():
        if v[key] != plain:
            legal = str(plain).lower() if isinstance(plain, bool) else plain
            yield key, f"has no form with pp={pp} yet", f"{key}={legal}"
    try:
        _layers(v)
    except CaseError as error:
        yield error.key, error.rule, error.legal


def _layers(v: Mapping[str, Any]) -> None:
    """Raise CaseError for layers that the stages cannot share."""
    PipelineGroup(ranks=tuple(range(v["pp"]))).layers(
        v["layers"], 0, first=v["first_layers"] or None, last=v["last_layers"] or None
    )
