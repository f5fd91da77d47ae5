"""What changed between two sides, in a sentence a mode: the first lines of a regression report.

The sentence is derived from the events alone, so that it holds for any subject: new calls that all lie in micro-batches
or steps which the base does not have are "one more micro-batch"; what all other changes have in common is named once.
"""

from collections.abc import Iterable, Iterator

import pandas as pd

from shardproof.reports.comparing.snapshot import parse_span
from shardproof.reports.printing.text_tables import byte_size

_UNITS = {"steps": ("step", "steps"), "microbatches": ("micro-batch", "micro-batches")}
OUTSIDE = "outside modules"


def describe_changes(
    folded: pd.DataFrame, traffic: pd.DataFrame, base: pd.DataFrame, new: pd.DataFrame
) -> Iterator[str]:
    """Sentences, from `fold_changes`, the traffic of a comparison and the counted events of both sides.

    Modes that changed alike share a sentence: "tp-sp: one more micro-batch: 54 calls, 1.6 MiB more on a rank".
    """
    modes: dict[str, list[str]] = {}
    for mode in dict.fromkeys(traffic["mode"].astype("str")):
        rows = folded[folded["mode"].astype("str") == mode]
        sides = [events[events["mode"].astype("str") == mode] for events in (base, new)]
        own = traffic[traffic["mode"].astype("str") == mode]
        if rows.empty:
            sentence = f"no event differs: {_amounts(own)}"
        else:
            sentence = f"{'; '.join(_find_reasons(rows, *sides))}: {_describe_growth(own)}"
        modes.setdefault(sentence, []).append(mode)
    yield from (f"{', '.join(names)}: {sentence}" for sentence, names in modes.items())


def _amounts(traffic: pd.DataFrame) -> str:
    calls, size = traffic["calls"].sum(), traffic["payload_bytes"].sum(skipna=False)
    return f"{_count_calls(int(calls))}, {byte_size(size) if pd.notna(size) else 'unknown bytes'} on a rank"


def _describe_growth(traffic: pd.DataFrame) -> str:
    """How many calls and bytes there are more on a rank, or fewer."""
    calls = int(traffic["new_calls"].sum() - traffic["calls"].sum())
    size = traffic["new_payload_bytes"].sum(skipna=False) - traffic["payload_bytes"].sum(skipna=False)
    sized = "unknown bytes" if pd.isna(size) else byte_size(abs(size))
    if pd.notna(size) and calls * size > 0:
        return f"{_count_calls(abs(calls))}, {sized} {'more' if calls > 0 else 'less'} on a rank"
    if not calls and pd.notna(size) and not size:
        return "as many calls and bytes on a rank"
    parts = [f"{_count_calls(abs(calls))} {'more' if calls > 0 else 'fewer'}" if calls else "as many calls"]
    parts += (
        ["as many bytes" if not size else f"{sized} {'more' if size > 0 else 'less'}"] if pd.notna(size) else [sized]
    )
    return f"{', '.join(parts)} on a rank"


def _find_reasons(rows: pd.DataFrame, base: pd.DataFrame, new: pd.DataFrame) -> Iterator[str]:
    """What the changes of one mode are, the widest reason first."""
    added = False
    for column, (one, many) in _UNITS.items():
        old, now = (_numbers(events[column]) for events in (base, new))
        for kind, numbers, way in (("new", now - old, "more"), ("gone", old - now, "fewer")):
            if not (numbers and (old if kind == "new" else now)):  # without calls on one side nothing is "more"
                continue
            inside = rows["kind"].eq(kind) & rows[column].map(lambda text, of=numbers: {*parse_span(text)} <= of)
            if inside.any():
                added = True
                rows = rows[~inside]
                yield f"{'one' if len(numbers) == 1 else len(numbers)} {way} {one if len(numbers) == 1 else many}"
    if added:  # what closes a step stands in its last micro-batch, whichever that is
        rows = rows[rows["kind"] != "moved"]
    for word, own in rows.groupby("kind", sort=False):
        yield _describe_rows(str(word), own)


def _describe_rows(kind: str, rows: pd.DataFrame) -> str:
    """Changes of one kind: a single one wholly, several by what they share."""
    ops, phases, places = (list(dict.fromkeys(rows[name].astype("str"))) for name in ("op", "phase", "region"))
    where = f"in {_some(phases)} of {_some([place or OUTSIDE for place in places])}"
    if kind != "changed":
        return f"{kind} {_some(ops)} {where}"
    parts = [text.split(", ") for text in rows["what"]]
    shared = [part for part in parts[0] if all(part in other for other in parts)]
    names = dict.fromkeys(part.split()[0] for own in parts for part in own)
    return f"{', '.join(shared) or 'another ' + ' and '.join(names)} in {_some(ops)} {where}"


def _some(names: list[str]) -> str:
    """The names, where they are few."""
    return " and ".join(names) if len(names) < 3 else f"{names[0]} and {len(names) - 1} others"


def _numbers(spans: Iterable[str]) -> set[int]:
    return {number for text in set(spans) for number in parse_span(text) if number >= 0}


def _count_calls(calls: int) -> str:
    return f"{calls:,} call{'' if calls == 1 else 's'}"
