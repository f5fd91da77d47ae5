"""What makes the words of a pipeline legal: `pp schedule chunks group first_layers last_layers`, and their company.

Ranks share layers as in Megatron-Core: those of the first and the last rank where they are stated, the rest evenly, and
each splits its own evenly over its chunks. Its interleaved schedule runs groups of micro-batches, none smaller than pp.
Where weights have ranks of their own (isp), these are of one stage, as in InternEvo, whose orders all end in pp.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from reference.case.modes import mode_of, whose
from reference.errors import CaseError
from reference.groups import PipelineGroup

__all__ = ["SCHEDULES", "WORDS", "problems"]

SCHEDULES = ("gpipe", "1f1b", "interleaved")
WORDS: Mapping[str, Any] = {"schedule": "1f1b", "chunks": 1, "group": 0, "first_layers": 0, "last_layers": 0}
"""Each word that only several stages have, with its default."""


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
        rule = "runs whole models, as DeepSpeed's inference does"
        yield "pp", f"mode={v['mode']} {rule}; pipelines run mode={whose(lambda one: one.stages)}", "pp=1"
    words = v["order"].lower().split("-")
    if mode_of(v).gathers_weights and "pp" in words[:-1]:
        rule = f"must end in pp: mode={v['mode']} splits the weights of a stage over neighbouring ranks"
        yield "order", rule, f"order={'-'.join([*(word for word in words if word != 'pp'), 'pp'])}"
    yield from _chunks(v)
    try:
        _layers(v)
    except CaseError as error:
        yield error.key, error.rule, error.legal


def _chunks(v: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Megatron-Core's rules: pp <= group <= micro, and the last group is no smaller than pp."""
    pp, micro, group = v["pp"], v["micro"], v["group"] or v["pp"]
    if v["schedule"] != "interleaved":
        for key in ("chunks", "group"):
            if v[key] != WORDS[key]:
                yield key, f"is for schedule=interleaved, not for schedule={v['schedule']}", f"{key}={WORDS[key]}"
        return
    if v["chunks"] < 2:
        yield "chunks", "schedule=interleaved needs at least two chunks on every rank", "chunks=2"
    if micro < pp:
        yield "micro", f"schedule=interleaved needs at least pp={pp} micro-batches", f"micro={pp}"
    elif not pp <= group <= micro:
        yield "group", f"must be from pp={pp} to micro={micro}", "group=0"
    elif 0 < micro % group < pp:
        rule = f"the last group would have {micro % group} micro-batches, fewer than pp={pp} (group={group})"
        yield "micro", rule, f"micro={micro - micro % group}"


def _layers(v: Mapping[str, Any]) -> None:
    """Raise CaseError for layers that the ranks and their chunks cannot share, or that leave a rank without any."""
    group = PipelineGroup(ranks=tuple(range(v["pp"])), chunks=v["chunks"])
    every = range(v["pp"])
    held = [
        group.layers(v["layers"], rank, first=v["first_layers"] or None, last=v["last_layers"] or None)
        for rank in every
    ]
    if without := [rank for rank in every if not held[rank]]:
        rule = f"leaves none to pipeline ranks {without} of pp={v['pp']}"
        raise CaseError("layers", v["layers"], rule, f"layers={v['layers'] + v['chunks'] * len(without)}")
