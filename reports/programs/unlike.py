"""Steps of a recorded program, and micro-batches of a step, that issue other calls than the most typical one."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from shardproof.harness.ledger import PASSES
from shardproof.reports.comparing.snapshot import format_span
from shardproof.reports.stored.frames import Run

_Kind = frozenset[tuple[Any, int]]
"""Calls, and how often each is issued."""


def median_over_steps(calls: Iterable[int], steps_in_all: int) -> float:
    """The median over steps, with 0 for those without such a call."""
    there = [int(one) for one in calls]
    padded = sorted([0] * (steps_in_all - len(there)) + there)
    middle = len(padded) // 2
    return padded[middle] if len(padded) % 2 else (padded[middle - 1] + padded[middle]) / 2


def find_unlike_steps(run: Run, unit: str) -> Iterator[str]:
    """At most 3 sentences on steps, or micro-batches of the last step, that issue other calls than the typical one."""
    kinds = _find_kinds(run, unit)
    if len(kinds) > 1:
        most = _typical_kind(kinds)
        usual = Counter(dict(most))
        for kind in [kind for kind in kinds if kind != most][:3]:
            more, less = Counter(dict(kind)) - usual, usual - Counter(dict(kind))
            here, usual_ones = (_name_span(unit, kinds[one]) for one in (kind, most))
            yield f"{here}, unlike {usual_ones}: {_words_of_calls(more, less)}"


def _name_span(unit: str, numbers: Sequence[int]) -> str:
    """Step 3; micro-batches 0..1."""
    one, several = {"step": ("step", "steps"), "microbatch": ("micro-batch", "micro-batches")}[unit]
    return f"{one if len(numbers) == 1 else several} {format_span(numbers)}"


def list_unlike_steps(run: Run) -> list[int]:
    """The steps that issue other calls than the most typical one."""
    kinds = _find_kinds(run, "step")
    most = _typical_kind(kinds) if kinds else None
    return sorted(number for kind, numbers in kinds.items() if kind != most for number in numbers)


def _find_kinds(run: Run, unit: str) -> Mapping[_Kind, list[int]]:
    """The steps, or micro-batches of the last step, by the calls that they issue."""
    events = _without_uneven_sizes(run.ledger.astype({"axis": "str", "op": "str", "phase": "str"}))
    events = events.assign(payload_bytes=events["payload_bytes"].fillna(0))  # a size that is not compared
    events = events[events["step"] >= 0]  # a trace has calls outside of steps
    if unit == "microbatch":
        inside = events["phase"].isin(PASSES)
        events = events[inside & (events["step"] == events["step"].max())]
    kinds: dict[_Kind, list[int]] = {}
    for number, rows in events.groupby(unit):
        kinds.setdefault(frozenset(_count_calls(rows).items()), []).append(int(str(number)))
    return kinds


def _typical_kind(kinds: Mapping[_Kind, list[int]]) -> _Kind:
    """The kind that is closest to the median of all, which has each call as often as the median step or micro-batch."""
    counts: dict[Any, list[int]] = {}
    for kind, numbers in kinds.items():
        for call, times in kind:
            counts.setdefault(call, []).extend([times] * len(numbers))
    number = sum(map(len, kinds.values()))
    usual = {call: median_over_steps(times, number) for call, times in counts.items()}
    whole = sum(usual.values())

    def distance(kind: _Kind) -> float:
        return whole + sum(abs(times - usual[call]) - usual[call] for call, times in kind)

    return min(kinds, key=lambda kind: (distance(kind), -len(kinds[kind]), -max(kinds[kind])))


def _without_uneven_sizes(events: pd.DataFrame) -> pd.DataFrame:
    """The calls. An all-to-all whose place sends different numbers of rows, or may, has no size, since that depends on
    data.
    """
    if "sent_rows" not in events:
        return events
    sent = events["sent_rows"].astype("str")
    unlike = sent.map({text: text == "?" or len({*text.split("+")}) > 1 for text in sent.unique()})
    place = ["phase", "region", "op", "axis", "caller"]
    return events.assign(
        payload_bytes=events["payload_bytes"].mask(
            unlike.groupby([events[one] for one in place], observed=True).transform("any"), 0
        )
    )


def _count_calls(rows: pd.DataFrame) -> Mapping[Any, int]:
    columns = ["rank", "phase", "region", "op", "axis", "dtype", "payload_bytes", "caller"]
    return Counter(rows[columns].itertuples(index=False, name=None))


def _words_of_calls(more: Counter[Any], less: Counter[Any]) -> str:
    """The first call that is extra or missing, and how many there are, on the rank that has most of them."""
    parts = []
    for sign, calls in (("more", more), ("fewer", less)):
        if calls:
            rank, phase, region, op, axis, dtype, size, caller = next(iter(sorted(calls)))
            number = max(Counter({one[0]: 0 for one in calls} | _by_rank(calls)).values())
            places = (("over", axis), ("in", region), ("at", caller))
            words = [
                phase,
                op,
                f"of {size:,} B" if size else "?",
                dtype,
                *(f"{word} {at or '?'}" for word, at in places),
            ]
            told = " ".join(word for word in words if not word.endswith("?"))  # a trace may not know them
            parts.append(f"{number} {sign}, first {told}")
    return "; ".join(parts)


def _by_rank(calls: Counter[Any]) -> dict[int, int]:
    found: Counter[int] = Counter()
    for one, number in calls.items():
        found[one[0]] += number
    return dict(found)
