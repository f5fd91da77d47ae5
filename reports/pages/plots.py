"""Drawings as inline SVG: bytes against tokens, one line a mode, the break-even marked; a step of a pipeline.

Functions from frames to a string that can stand inside an HTML page. Text stays text in the page's own font and colour
(so light and dark both work). No link leads out of it, and equal frames give equal bytes.
"""

import io
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pandas as pd

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
            # Two modes may send the same bytes: the dashes of the second let the first shine through.
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


_MOST_BARS = 4000
"""More of them become one picture of dots."""
_LABELLED = 300
"""Bars of which each shows its micro-batch."""


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
                    rasterized=len(spans) > _MOST_BARS,
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
