"""Drawings as inline SVG: bytes against tokens, a step of a pipeline, and pictures of a job's traces.

Functions from frames to a string that can stand inside an HTML page. Text stays text in the page's own font and colour
(so light and dark both work). No link leads out of it, and equal frames give equal bytes. Pictures of traces show bytes
by op, the exposed share of steps, bandwidth, late ranks, odd steps and largest calls, each from the frame of one name
(reports.programs.program_frames); an empty frame gives no picture.
"""

import io
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd
from markupsafe import Markup

from shardproof.reports.pages.charts import Chart, ChartCell, count_whole
from shardproof.reports.pages.drawings import PHASE_COLOURS, draw_bar
from shardproof.reports.printing.text_tables import byte_size, count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#010203"
"""Stands for the page's text colour while matplotlib draws; no line of a mode has it."""
COLOURS = ("#8d99ae", "#3b82c4", "#8e6bbf", "#e08a2e", "#d1495b", "#2a9d6f", "#a1785a", "#2fa7b5")
_MARKERS = "osD^vP"
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "shardproof",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.2,
    "legend.frameon": False,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    "grid.color": INK,
}


def break_even(growth: pd.DataFrame, crossings: pd.DataFrame, title: str) -> str:
    """Bytes against tokens, one line a mode, both axes logarithmic, every crossing T* marked.

    `growth`: mode, tokens, wire_bytes. `crossings`: mode, other, tokens (T*), wire_bytes.
    """
    with open_canvas(title, 560, 340) as (figure, axes):
        groups = growth.sort_values("tokens").groupby("mode", observed=True, sort=True)
        for number, (mode, line) in enumerate(groups):
            colour, marker = COLOURS[(number + 1) % len(COLOURS)], _MARKERS[number % len(_MARKERS)]
            # Two modes may send the same bytes: the first shows between the dashes of the second.
            dash = "--" if number % 2 else "-"
            sent_mib = line["wire_bytes"] / 2**20
            axes.plot(line["tokens"], sent_mib, ls=dash, color=colour, marker=marker, ms=4, label=str(mode))
        for number, crossing in enumerate(crossings.sort_values("tokens").to_dict("records")):
            axes.axvline(crossing["tokens"], color=INK, lw=0.8, ls=":", alpha=0.7)
            axes.plot([crossing["tokens"]], [crossing["wire_bytes"] / 2**20], "o", ms=9, mfc="none", color=INK)
            axes.annotate(
                f"T* = {round(crossing['tokens']):,}: {crossing['mode']} below {crossing['other']}",
                (crossing["tokens"], 0.02 + 0.06 * number),
                xycoords=("data", "axes fraction"),
                xytext=(5, 0),
                textcoords="offset points",
                fontsize=9,
            )
        axes.set(xscale="log", yscale="log", xlabel="tokens per micro-batch", ylabel="MiB per rank (ring model)")
        axes.set_xticks(sorted(set(growth["tokens"])))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda value, _: f"{value:,.4g}")
            axis.set_minor_formatter(lambda value, _: f"{value:,.4g}")
        axes.xaxis.minorticks_off()
        if len(growth):
            axes.legend(loc="upper left")
    return inline_svg(figure, title, "break-even")


_MOST_SPANS = 4000
"""The bars of more spans are drawn as a bitmap."""
_LABELLED = 300
"""Up to this number each bar shows its micro-batch."""


def plot_pipeline(spans: pd.DataFrame, title: str) -> str:
    """A step of a pipeline: a line for each rank, a bar for each forward and backward; what is empty is the bubble.

    `spans`: rank, kind ("F", "B"), micro, chunk, start_s, end_s. Other kinds are calls under way, thin below the bars.
    """
    ranks, calls = spans["rank"].nunique(), spans[~spans["kind"].isin(("F", "B"))]
    spans = spans[spans["kind"].isin(("F", "B"))]
    chunks = spans["chunk"].nunique()
    with open_canvas(title, 900, 90 + 22 * ranks) as (figure, axes):
        axes.grid(False)
        for colour, kind, name in ((COLOURS[1], "F", "forward"), (COLOURS[3], "B", "backward")):
            for number, (chunk, own) in enumerate(spans[spans["kind"] == kind].groupby("chunk", sort=True)):
                axes.barh(
                    own["rank"],
                    own["end_s"] - own["start_s"],
                    left=own["start_s"],
                    height=0.8,
                    color=colour,
                    alpha=1 - 0.6 * number / chunks,
                    label=f"{name}, chunk {chunk}" if chunks > 1 else name,
                    linewidth=0.0,
                    rasterized=len(spans) > _MOST_SPANS,
                )
        if len(calls):
            axes.barh(
                calls["rank"] + 0.45,
                calls["end_s"] - calls["start_s"],
                left=calls["start_s"],
                height=0.1,
                color=COLOURS[5],
                label="call under way",
                linewidth=0.0,
            )
        if len(spans) <= _LABELLED:
            for one in spans.to_dict("records"):
                place = (one["start_s"] + one["end_s"]) / 2, one["rank"]
                axes.annotate(str(one["micro"]), place, ha="center", va="center", fontsize=7)
        axes.set(xlabel="seconds", ylabel="rank", yticks=range(ranks), ylim=(ranks - 0.5, -0.5))
        axes.set_xlim(0, float(spans["end_s"].max()))
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4)
    return inline_svg(figure, title, f"pipeline-{zlib.crc32(title.encode()):08x}")


def _matplotlib() -> ModuleType:
    import matplotlib.figure  # noqa: PLC0415  (half a second, and few pages draw)

    return matplotlib


@contextmanager
def open_canvas(title: str, width_px: int, height_px: int) -> "Iterator[tuple[Figure, Axes]]":
    """A figure outside pyplot's global state, in the page's style."""
    mpl = _matplotlib()
    with mpl.rc_context(_STYLE):
        figure = mpl.figure.Figure(figsize=(width_px / 72, height_px / 72), layout="constrained")
        figure.patch.set_alpha(0.0)
        axes = figure.add_subplot()
        axes.patch.set_alpha(0.0)
        yield figure, axes


def inline_svg(figure: "Figure", title: str, name: str) -> str:
    """The figure as an `<svg>` element: no prolog, no metadata, no name space, ids that are unique on the page."""
    buffer = io.StringIO()
    with _matplotlib().rc_context(_STYLE):
        figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :].replace(INK, "currentColor")
    svg = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", svg).replace("xlink:href", "href")
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'(url\(#|href="#)', rf"\1{name}-", svg)
    label = title.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    return svg.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)


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
    """A bar: its label, the lengths of its parts by name, and words above it."""

    label: str
    parts: Mapping[str, float]
    words: str


class Picture(NamedTuple):
    """A sentence that says what is drawn, and a chart or a figure as `<svg>`."""

    caption: str
    chart: Chart | None = None
    figure: Markup = Markup()


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
        words = f"{_milliseconds(sum(parts.values()))}, {row['share']:.0%} exposed"
        bars.append(_Bar(f"rank {row['rank']}, step {row['step']}", parts, words))
    caption = "By rank and step: exposed is communication while nothing computes, which the step waits for."
    yield from _draw_bars("What the device does in a step", bars, _TIMES, caption, _milliseconds)


def _draw_traffic(frame: pd.DataFrame) -> Iterator[Picture]:
    known = frame[frame["payload_bytes"].notna()]
    bars = []
    for (op, axis), rows in known.groupby(["op", "axis"], observed=True, sort=False):
        sizes = rows.groupby(rows["phase"].astype("str"), sort=False)["payload_bytes"].sum()
        parts = {str(phase): float(size) for phase, size in sizes.items()}
        words = f"{byte_size(sum(parts.values()))}, {count(rows['calls'].sum())} calls"
        bars.append(_Bar(f"{op} over {axis}", parts, words))
    bars.sort(key=lambda bar: -sum(bar.parts.values()))
    caption = "One rank, the one that has most, all recorded steps; calls of unknown payload are not drawn."
    yield from _draw_bars("Payload by op, axis and phase", bars, PHASE_COLOURS, caption, byte_size)


def _draw_bandwidth(frame: pd.DataFrame) -> Iterator[Picture]:
    if not len(frame) or "payload_bytes" not in frame:
        return
    title = "Bandwidth by op and size"
    with open_canvas(title, 560, 320) as (figure, axes):
        for number, (name, rows) in enumerate(frame.astype({"op": "str", "axis": "str"}).groupby(["op", "axis"])):
            shown, colour = rows.head(_MOST_POINTS), COLOURS[(number + 1) % len(COLOURS)]
            label = f"{name[0]} over {name[1]}" if isinstance(name, tuple) else str(name)
            sizes_mib = shown["payload_bytes"].astype("float64") / _MIB
            axes.plot(sizes_mib, shown["gb_s"], "os^Dv"[number % 5], color=colour, ms=6, label=label)
        axes.set(xscale="log", yscale="log", xlabel="MiB of a call", ylabel="GB/s (ring model)")
        axes.legend(loc="lower right")
    caption = f"{title}. What one rank sends over the time of the kernels, waiting for late ranks included."
    svg = Markup(inline_svg(figure, title, "trace-bandwidth"))  # noqa: S704  (names are escaped)
    yield Picture(caption, figure=svg)


def _draw_late_ranks(frame: pd.DataFrame) -> Iterator[Picture]:
    late = frame[frame["late_us"].notna()]
    bars = [
        _Bar(
            f"rank {row['rank']}",
            {"late": row["late_us"] / _MS},
            f"{_milliseconds(row['late_us'] / _MS)}, last in {row['latest']:.0%}",
        )
        for row in late.sort_values("late_us", ascending=False, kind="stable").to_dict("records")
    ]
    caption = "Median time by which a rank's kernel is shorter than the longest one of its group: a kernel waits for "
    yield from _draw_bars("Late ranks", bars, {"late": COLOURS[3]}, caption + "the last rank.", _milliseconds)


def _draw_steps(frame: pd.DataFrame) -> Iterator[Picture]:
    known = frame["payload_bytes"].notna().all()
    bars = []
    for row in frame.to_dict("records"):
        size = float(row["payload_bytes"] if known else row["calls"])
        words = f"{byte_size(size)}, " if known else ""
        words += f"{count(row['calls'])} calls{', unlike the others' if row['unlike'] else ''}"
        bars.append(_Bar(f"step {row['step']}", {_ODD if row["unlike"] else _USUAL: size}, words))
    if len(bars) > 1:
        bars = sorted(bars, key=lambda bar: _ODD not in bar.parts) if len(bars) > _MOST_BARS else bars
        caption = "The rank that has most; sizes of uneven all-to-alls differ by themselves and are not compared."
        colours = {_USUAL: COLOURS[1], _ODD: COLOURS[4]}
        write = byte_size if known else count_whole
        yield from _draw_bars("Steps, and those that issue other calls than most", bars, colours, caption, write)


def _draw_largest(frame: pd.DataFrame) -> Iterator[Picture]:
    bars = []
    for row in frame.to_dict("records"):
        size, place = row["payload_bytes"], ", ".join(str(row[name]) for name in ("phase", "region", "caller"))
        words = f"{byte_size(size)}, {count(row['calls'])} calls: {place}"
        bars.append(_Bar(f"{row['op']} over {row['axis']}", {"payload": float(size)}, words))
    caption = "Phase, module and line of each, ? where the trace does not know it."
    yield from _draw_bars("The largest calls", bars, {"payload": COLOURS[2]}, caption, byte_size)


def _milliseconds(value: object) -> str:
    return f"{float(str(value)):.3g} ms"


def _draw_bars(
    title: str, bars: Sequence[_Bar], colours: Mapping[str, str], caption: str, write: Callable[[object], str]
) -> Iterator[Picture]:
    """Bars below each other on one scale, the words of each above it; nothing where there is no bar."""
    if not bars:
        return
    shown, more = bars[:_MOST_BARS], len(bars) - _MOST_BARS
    longest = max(sum(bar.parts.values()) for bar in shown)
    used = {part for bar in shown for part, size in bar.parts.items() if size}
    rows = []
    for bar in shown:
        parts = [(part, bar.parts[part], colours.get(part, "currentColor")) for part in bar.parts if part in used]
        rows.append((bar.label, (ChartCell(text=bar.words, bar=draw_bar(parts, longest, title, write)),)))
    legend = tuple((part, colour) for part, colour in colours.items() if part in used) if len(colours) > 1 else ()
    rest = f" {more} more are in the frame of that name." if more > 0 else ""
    yield Picture(caption + rest, Chart(title=title, legend=legend, headers=("", ""), rows=tuple(rows)))
