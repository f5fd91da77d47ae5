"""Drawings of a page as inline SVG, without a library: bars of a case, its timeline; and the tree of its modules.

Bars: one line a case, wire bytes by phase and memory saved for backward. A bar is 100 by 10 units and stretches with
its cell. All bars of a column have one scale, and no bar adds up two cases. Bytes are the most that any rank sends.
Margin: how close the worst tensor of a case came to its limit, from a millionth of it to the whole, by powers of ten.
Timeline: one micro-batch, one row a rank, one colour a phase, asynchronous calls on the lower half of a row. Times are
milliseconds from the first call drawn. A call has its phase, op, bytes and module under the pointer. Tree: what a
module and everything in it send, calls and payload bytes of the busiest rank. All cases of a mode on as many ranks are
added up. Where a model has many layers, equal paths of different layers are one: "layers.*.mlp.w1".
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pandas as pd
from markupsafe import Markup, escape

from shardproof.harness.ledger import BACKWARD, PHASES
from shardproof.reports.printing.text_tables import NOTHING, byte_size, count, placed_calls, small
from shardproof.reports.stored.frames import LAYER_NUMBER, Run
from shardproof.reports.stored.summary import LAUNCH, badness_of, split_common_words

_COLOURS = "#8d99ae #3b82c4 #8e6bbf #e08a2e #d1495b #5b5f97 #2a9d6f #a1785a #2fa7b5 #6d6875 #b8b8b8"
PHASE_COLOURS = dict(zip((*PHASES, "?"), _COLOURS.split(), strict=True))
"""The last colour is that of calls in traces whose phase is unknown."""
SAVED, _WITHIN, _BEYOND = "#7a8450", "#2a9d6f", "#c8372d"
_DECADES = 6
"""The bar of a margin begins this many powers of ten below the limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseBars:
    """A case: its words, its bars as markup, and its figures as text."""

    verdict: str
    mode: str
    ranks: str
    case: str
    calls: str
    wire: Markup
    wire_bytes: float
    wire_size: str
    payload_size: str
    saved: Markup
    saved_bytes: float
    saved_size: str
    error: str
    margin: Markup
    share: float
    """The error as a share of its limit; -1 if nothing was measured."""
    decided: str
    begins: bool
    """Whether the line above has the same mode and another number of ranks."""


def lines_of_cases(run: Run, headline: pd.DataFrame) -> tuple[tuple[CaseBars, ...], str]:
    """The lines, failures first, then by mode and ranks; and the words that all of their cases have in common."""
    shared, own = split_common_words(headline["words"])
    frame = headline.assign(own=own, bad=-headline["verdict"].map(badness_of))
    wire: dict[str, dict[str, float]] = {case: {} for case in frame["case"]}
    for line in run.summary[["case", "phase", "wire_bytes"]].dropna().to_dict("records"):
        sent = wire.setdefault(line["case"], {})
        sent[line["phase"]] = sent.get(line["phase"], 0.0) + line["wire_bytes"]
    longest = max((sum(sizes.values()) for sizes in wire.values()), default=0.0)
    fullest = max((float(size) for size in frame["saved_bytes"].dropna()), default=0.0)
    made: list[CaseBars] = []
    for row in frame.sort_values(["bad", "mode", "ranks"], kind="stable").to_dict("records"):
        sent = wire[row["case"]]
        parts = [(phase, sent[phase], colour) for phase, colour in PHASE_COLOURS.items() if sent.get(phase)]
        kept = 0.0 if pd.isna(row["saved_bytes"]) else float(row["saved_bytes"])
        ranks, unseen = count(row["ranks"]), row["against"] == LAUNCH
        made.append(
            CaseBars(
                verdict=row["verdict"],
                mode=str(row["mode"]),
                ranks=ranks,
                case=row["own"] or shared or "-",
                calls=NOTHING if unseen else placed_calls(row),
                wire=draw_bar(parts, longest, "wire"),
                wire_bytes=sum(sent.values()),
                wire_size=NOTHING if unseen else byte_size(sum(sent.values())),
                payload_size=NOTHING if unseen else byte_size(row["payload_bytes"]),
                saved=draw_bar([("saved", kept, SAVED)], fullest, "memory"),
                saved_bytes=kept,
                saved_size=byte_size(row["saved_bytes"]),
                error=_text_of_pair(row["worst_error"], row["worst_allowed"]),
                margin=_draw_margin(row["worst_error"], row["worst_allowed"]),
                share=_share_of_limit(row["worst_error"], row["worst_allowed"]),
                decided="-" if pd.isna(row["tensors"]) else f"{count(row['decided'])} of {count(row['tensors'])}",
                begins=bool(made) and made[-1].mode == row["mode"] and made[-1].ranks != ranks,
            )
        )
    return tuple(made), shared


def _text_of_pair(error: float, allowed: float) -> str:
    return "-" if pd.isna(error) else f"{small(error)} / {small(allowed)}"


def _share_of_limit(error: float, allowed: float) -> float:
    if not math.isfinite(error):
        return -1.0 if math.isnan(error) else math.inf
    return error / allowed if allowed else math.inf if error else 0.0


def _draw_margin(error: float, allowed: float) -> Markup:
    """How close the worst tensor of a case is to its limit, by powers of ten; the whole cell beyond it."""
    share = _share_of_limit(error, allowed)
    if share < 0:
        return Markup("-")
    way = max(0.0, min(1.0, 1 + math.log10(share) / _DECADES)) if share > 0 else 0.0
    rule = f'<rect width="{100 * way:.1f}" height="10" fill="{_WITHIN if share <= 1 else _BEYOND}"/>'
    label = f'role="img" aria-label="{escape(_text_of_pair(error, allowed))}: error / allowed"'
    return Markup(f'<svg {label} class="bar" viewBox="0 0 100 10" preserveAspectRatio="none">{rule}</svg>')  # noqa: S704


Part = tuple[str, float, str]
"""A part of a bar: its name, its size, its colour."""


def draw_bar(parts: Sequence[Part], full: float, what: str, write: Callable[[object], str] = byte_size) -> Markup:
    """Parts beside each other. A part as large as `full` is as long as the cell."""
    drawn, left = [], 0.0
    for _, size, colour in parts:
        wide = 100 * size / full if full else 0.0
        drawn.append(f'<rect x="{left:.3f}" width="{wide:.3f}" height="10" fill="{colour}"/>')
        left += wide
    sizes = ", ".join(f"{name} {write(size)}" for name, size, _ in parts) or "none"
    label = f'role="img" aria-label="{what}: {escape(sizes)}"'
    head = f'<svg {label} class="bar" viewBox="0 0 100 10" preserveAspectRatio="none">'
    return Markup(head + "".join(drawn) + "</svg>")  # noqa: S704  (numbers, colours and our own names of phases)


MOST_NODES = 80
"""Above this number of modules of one mode, layers are folded into one."""
OUTSIDE = "outside modules"
_Row = tuple[tuple[str, ...], str, int, int]
"""Path, phase, calls, bytes."""
_KEYS = ["mode", "world_size", "phase", "region"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A module: its name, what it and its parts send in all phases, and its parts."""

    name: str
    calls: int
    payload_bytes: int
    forward_bytes: int
    backward_bytes: int
    parts: "tuple[Node, ...]" = ()

    @property
    def other_bytes(self) -> int:
        """Bytes sent in other phases: data, loss, gradient synchronisation, step."""
        return self.payload_bytes - self.forward_bytes - self.backward_bytes


def by_module(run: Run) -> pd.DataFrame:
    """mode, world_size, phase, region, calls, payload_bytes: of the rank that has most, cases added up."""
    ranks = run.ledger.groupby(["case", "rank", *_KEYS], observed=True, sort=False)["payload_bytes"]
    most = ranks.agg(calls="size", payload_bytes="sum").groupby(["case", *_KEYS], observed=True, sort=False).max()
    return most.groupby(_KEYS, observed=True, sort=True).sum().reset_index()


def build_tree(lines: pd.DataFrame) -> tuple[Node, ...]:
    """The modules of one mode, outermost first, in the order of their names; from the rows of `by_module`."""
    regions = lines["region"].where(lines["region"] != "", OUTSIDE)
    if regions.nunique() > MOST_NODES:
        regions = regions.str.replace(LAYER_NUMBER, "*", regex=True)
    rows = zip(regions, lines["phase"].astype("str"), lines["calls"], lines["payload_bytes"], strict=True)
    return tuple(_build_nodes([(tuple(path.split(".")), phase, calls, size) for path, phase, calls, size in rows], 0))


def _build_nodes(rows: list[_Row], depth: int) -> Iterator[Node]:
    names = {path[depth] for path, _, _, _ in rows if len(path) > depth}
    for own in sorted(names, key=_natural_order):
        inside = [row for row in rows if row[0][depth : depth + 1] == (own,)]
        name, parts = own, tuple(_build_nodes(inside, depth + 1))
        # A single part that sends all of it shares the line.
        while len(parts) == 1 and parts[0].payload_bytes == _sum_bytes(inside):
            name, parts = f"{name}.{parts[0].name}", parts[0].parts
        yield Node(
            name=name,
            calls=sum(calls for _, _, calls, _ in inside),
            payload_bytes=_sum_bytes(inside),
            forward_bytes=_sum_bytes(inside, "forward"),
            backward_bytes=_sum_bytes(inside, *BACKWARD),
            parts=parts,
        )


def _sum_bytes(rows: list[_Row], *phases: str) -> int:
    return sum(size for _, phase, _, size in rows if not phases or phase in phases)


def _natural_order(name: str) -> tuple[int, str, int]:
    """layers.2 before layers.10; calls outside of modules come last."""
    number = re.fullmatch(r"\d+", name)
    return (2 if name == OUTSIDE else 0), "" if number else name, int(name) if number else 0


_WIDTH, _LEFT, _ROW, _TOP = 1400.0, 64.0, 22.0, 8.0
_MOST_RANKS, _MOST_CALLS = 16, 3000
_CALL = ["phase", "op", "payload_bytes", "region"]


def last_micro_batch(ledger: pd.DataFrame) -> pd.DataFrame:
    """The calls of the last micro-batch of the last step of one case, and those after its backward."""
    last = ledger[ledger["step"] == ledger["step"].max()]
    calls: pd.DataFrame = last[last["microbatch"] == last["microbatch"].max()]
    return calls


def draw_timeline(calls: pd.DataFrame, title: str) -> str:
    """An `<svg>` of these calls (columns of the ledger) on the first ranks; "" if there is none."""
    ranks = sorted(calls["rank"].unique())[:_MOST_RANKS]
    calls = calls[calls["rank"].isin(ranks)].head(_MOST_CALLS).fillna({"duration_us": 0.0})
    if calls.empty:
        return ""
    start_us = float(calls["start_us"].min())
    spent_us = max(float((calls["start_us"] + calls["duration_us"]).max()) - start_us, 1.0)
    scale = (_WIDTH - _LEFT - 8) / spent_us
    height = _TOP + _ROW * len(ranks) + 38
    rows = {rank: _TOP + _ROW * place for place, rank in enumerate(ranks)}
    parts = [
        f'<text x="0" y="{y + 14:.0f}" font-size="11" fill="currentColor">rank {rank}</text>'
        f'<path d="M{_LEFT} {y + 18.5:.1f}H{_WIDTH}" stroke="currentColor" stroke-opacity=".15"/>'
        for rank, y in rows.items()
    ]
    drawn = [phase for phase in PHASE_COLOURS if (calls["phase"] == phase).any()]
    for (phase, op, size, region), alike in calls.groupby(_CALL, observed=True, sort=False, dropna=False):
        path = "".join(
            f"M{_LEFT + (start - start_us) * scale:.1f} {rows[rank] + (9 if later else 2):.0f}h"
            f"{(wide := max(spent * scale, 0.6)):.1f}v{8 if later else 14}h-{wide:.1f}z"  # a thinner bar is invisible
            for rank, start, spent, later in zip(
                alike["rank"], alike["start_us"], alike["duration_us"], alike["is_async"], strict=True
            )
        )
        amount = "unknown" if size is pd.NA else f"{size:,}"
        title_of_call = escape(f"{phase}: {op}, {amount} bytes, {region or OUTSIDE}")
        parts.append(f'<path d="{path}" fill="{PHASE_COLOURS[str(phase)]}"><title>{title_of_call}</title></path>')
    bottom = _TOP + _ROW * len(ranks)
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        x, anchor = _LEFT + share * spent_us * scale, "middle" if share < 1 else "end"
        text = f"{share * spent_us / 1000:,.3g} ms"
        parts.append(
            f'<text x="{x:.0f}" y="{bottom + 13:.0f}" font-size="10" text-anchor="{anchor}" '
            f'fill="currentColor">{text}</text>'
        )
    for place, phase in enumerate(drawn):
        x = _LEFT + 88 * place
        parts.append(
            f'<rect x="{x:.0f}" y="{bottom + 22:.0f}" width="9" height="9" fill="{PHASE_COLOURS[phase]}"/>'
            f'<text x="{x + 13:.0f}" y="{bottom + 30:.0f}" font-size="11" fill="currentColor">{phase}</text>'
        )
    label = escape(f"{title}: {len(calls)} calls on {len(ranks)} ranks in {spent_us / 1000:,.3g} ms")
    box = f'viewBox="0 0 {_WIDTH:.0f} {height:.0f}" width="{_WIDTH:.0f}" height="{height:.0f}"'
    return f'<svg role="img" aria-label="{label}" class="timeline" {box}>{"".join(parts)}</svg>'
