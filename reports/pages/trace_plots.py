"""Pictures of a job's traces: bytes by op, the exposed share of steps, bandwidth, late ranks, odd steps, largest calls.

Each is drawn from the frame of one name (reports.programs.program_frames); where that knows nothing there is no
picture. Inline SVG.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import pandas as pd

from shardproof.reports.pages.drawings import PHASE_COLOURS
from shardproof.reports.pages.plots import COLOURS, INK, inline_svg, open_canvas
from shardproof.reports.printing.text_tables import byte_size, count

_MOST_BARS, _MOST_POINTS = 32, 200
_MIB, _MS = 2**20, 1e3
_TIMES = {
    "computes": COLOURS[5],
    "computes and communicates": COLOURS[7],
    "communicates (exposed)": COLOURS[4],
    "does neither": COLOURS[0],
}
_USUAL, _ODD = "as the most typical step", "other calls"


class _Bar(NamedTuple):
    """A bar: its label, the lengths of its parts by name, and words behind it."""

    label: str
    parts: Mapping[str, float]
    words: str = ""


class Picture(NamedTuple):
    """A picture with its title and what it shows."""

    title: str
    svg: str
    caption: str


def draw_pictures(frames: Mapping[str, pd.DataFrame]) -> Iterator[Picture]:
    """The pictures of these frames."""
    yield from _draw_device(frames["device"])
    yield from _draw_traffic(frames["traffic"])
    yield from _draw_bandwidth(frames["bandwidth"])
    yield from _draw_late_ranks(frames["ranks"])
    yield from _draw_steps(frames["steps"])
    yield from _draw_largest(frames["largest"])


def _draw_device(frame: pd.DataFrame) -> Iterator[Picture]:
    bars = []
    for row in frame.to_dict("records"):
        exposed, hidden = row["exposed_us"], row["communication_us"] - row["exposed_us"]
        times = (row["compute_us"] - hidden, hidden, exposed, row["device_us"] - row["compute_us"] - exposed)
        parts = {name: max(0.0, time) / _MS for name, time in zip(_TIMES, times, strict=True)}
        bars.append(_Bar(f"rank {row['rank']}, step {row['step']}", parts, f"{row['share']:.0%} exposed"))
    if bars:
        title = "What the device does in a step"
        caption = "By rank and step: exposed is communication while nothing computes, which the step waits for."
        yield Picture(title, _draw_bars("device", title, bars, _TIMES, "milliseconds"), caption + _rest(bars))


def _draw_traffic(frame: pd.DataFrame) -> Iterator[Picture]:
    known = frame[frame["payload_bytes"].notna()]
    bars, used = [], dict[str, str]()
    for (op, axis), rows in known.groupby(["op", "axis"], observed=True, sort=False):
        sizes = rows.groupby(rows["phase"].astype("str"), sort=False)["payload_bytes"].sum()
        parts = {str(phase): float(size) / _MIB for phase, size in sizes.items()}
        used |= {phase: PHASE_COLOURS.get(phase, INK) for phase in parts}
        bars.append(_Bar(f"{op} over {axis}", parts, f"{count(rows['calls'].sum())} calls"))
    if bars:
        title = "Payload by op, axis and phase"
        caption = "One rank, the one that has most, all recorded steps; calls of unknown payload are not drawn."
        bars.sort(key=lambda bar: -sum(bar.parts.values()))
        yield Picture(title, _draw_bars("traffic", title, bars, used, "MiB"), caption + _rest(bars))


def _draw_bandwidth(frame: pd.DataFrame) -> Iterator[Picture]:
    if not len(frame) or "payload_bytes" not in frame:
        return
    title = "Bandwidth by op and size"
    with open_canvas(title, 760, 340) as (figure, axes):
        for number, (name, rows) in enumerate(frame.astype({"op": "str", "axis": "str"}).groupby(["op", "axis"])):
            shown, colour = rows.head(_MOST_POINTS), COLOURS[(number + 1) % len(COLOURS)]
            label = f"{name[0]} over {name[1]}" if isinstance(name, tuple) else str(name)
            sizes_mib = shown["payload_bytes"].astype("float64") / _MIB
            axes.plot(sizes_mib, shown["gb_s"], "os^Dv"[number % 5], color=colour, ms=6, label=label)
        axes.set(xscale="log", yscale="log", xlabel="MiB of a call", ylabel="GB/s (ring model)")
        axes.legend(loc="lower right")
    caption = "What one rank sends over the time of the kernels, waiting for late ranks included."
    yield Picture(title, inline_svg(figure, title, "trace-bandwidth"), caption)


def _draw_late_ranks(frame: pd.DataFrame) -> Iterator[Picture]:
    late = frame[frame["late_us"].notna()]
    bars = [
        _Bar(f"rank {row['rank']}", {"late": row["late_us"] / _MS}, f"last in {row['latest']:.0%}")
        for row in late.sort_values("late_us", ascending=False, kind="stable").to_dict("records")
    ]
    if bars:
        title = "Late ranks"
        caption = "Median time by which a rank's kernel is shorter than the longest one of its group, in milliseconds: "
        caption += "a kernel waits for the last rank."
        drawn = _draw_bars("late", title, bars, {"late": COLOURS[3]}, "milliseconds")
        yield Picture(title, drawn, caption + _rest(bars))


def _draw_steps(frame: pd.DataFrame) -> Iterator[Picture]:
    known = frame["payload_bytes"].notna().all()
    bars = []
    for row in frame.to_dict("records"):
        size = float(row["payload_bytes"]) / _MIB if known else float(row["calls"])
        words = f"{count(row['calls'])} calls{', unlike the others' if row['unlike'] else ''}"
        bars.append(_Bar(f"step {row['step']}", {_ODD if row["unlike"] else _USUAL: size}, words))
    if len(bars) > 1:
        title = "Steps, and those that issue other calls than most"
        colours = {_USUAL: COLOURS[1], _ODD: COLOURS[4]}
        bars = sorted(bars, key=lambda bar: _ODD not in bar.parts)[:_MOST_BARS] if len(bars) > _MOST_BARS else bars
        caption = "The rank that has most; sizes of uneven all-to-alls differ by themselves and are not compared."
        drawn = _draw_bars("steps", title, bars, colours, "MiB" if known else "calls")
        yield Picture(title, drawn, caption + (_rest(frame["step"].tolist())))


def _draw_largest(frame: pd.DataFrame) -> Iterator[Picture]:
    bars = []
    for row in frame.to_dict("records"):
        size, place = row["payload_bytes"], ", ".join(str(row[name]) for name in ("phase", "region", "caller"))
        words = f"{byte_size(size)}, {count(row['calls'])} calls: {place}"
        bars.append(_Bar(f"{row['op']} over {row['axis']}", {"payload": float(size) / _MIB}, words))
    if bars:
        title = "The largest calls"
        caption = "Phase, module and line of each, ? where the trace does not know it."
        yield Picture(title, _draw_bars("largest", title, bars, {"payload": COLOURS[2]}, "MiB of a call"), caption)


def _rest(bars: Sequence[object]) -> str:
    more = len(bars) - _MOST_BARS
    return f" {more} more are in the frame of that name." if more > 0 else ""


def _draw_bars(name: str, title: str, bars: Sequence[_Bar], colours: Mapping[str, str], unit: str) -> str:
    """Bars below each other, each of its parts beside each other, with words behind it."""
    shown = bars[:_MOST_BARS]
    longest = max((sum(bar.parts.values()) for bar in shown), default=0.0) or 1.0
    with open_canvas(title, 760, 90 + 22 * len(shown)) as (figure, axes):
        axes.grid(visible=False, axis="y")
        left = [0.0] * len(shown)
        for part, colour in colours.items():
            wide = [bar.parts.get(part, 0.0) for bar in shown]
            if any(wide):
                axes.barh(range(len(shown)), wide, left=left, height=0.7, color=colour, label=part, linewidth=0.0)
            left = [start + more for start, more in zip(left, wide, strict=True)]
        for place, (bar, end) in enumerate(zip(shown, left, strict=True)):
            inside = end > 0.6 * longest
            axes.annotate(
                bar.words, (end, place), xytext=(-4 if inside else 4, 0), textcoords="offset points",
                ha="right" if inside else "left", va="center", fontsize=8,
            )  # fmt: skip
        axes.set(xlabel=unit, yticks=range(len(shown)), yticklabels=[bar.label for bar in shown], xlim=(0, longest))
        axes.set_ylim(len(shown) - 0.5, -0.5)
        if len(colours) > 1:
            axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4)
    return inline_svg(figure, title, f"trace-{name}")
