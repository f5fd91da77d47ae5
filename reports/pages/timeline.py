"""The calls of every rank against time, as inline SVG: one micro-batch, one row a rank, one colour a phase.

What stands still on one rank while another computes is seen at once. Asynchronous calls lie on the lower half of a
row. Times are milliseconds from the first call drawn.
"""

from __future__ import annotations

from html import escape

import pandas as pd

from reports.pages.bars import PHASE_COLOURS

_WIDTH, _LEFT, _ROW, _TOP = 760.0, 64.0, 22.0, 8.0
_MOST_RANKS, _MOST_CALLS = 16, 3000


def last_micro_batch(ledger: pd.DataFrame) -> pd.DataFrame:
    """The calls of the last micro-batch of the last step of one case, with what follows its backward."""
    last = ledger[ledger["step"] == ledger["step"].max()]
    calls: pd.DataFrame = last[last["microbatch"] == last["microbatch"].max()]
    return calls


def timeline(calls: pd.DataFrame, title: str) -> str:
    """An `<svg>` of these calls (columns of the ledger); "" when there is none."""
    ranks = sorted(calls["rank"].unique())[:_MOST_RANKS]
    calls = calls[calls["rank"].isin(ranks)].head(_MOST_CALLS)
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
    for phase in drawn:
        of_phase = calls[calls["phase"] == phase]
        path = "".join(
            _bar(_LEFT + (start - start_us) * scale, rows[rank] + (9 if later else 2), spent * scale, later)
            for rank, start, spent, later in zip(
                of_phase["rank"], of_phase["start_us"], of_phase["duration_us"], of_phase["is_async"], strict=True
            )
        )
        parts.append(f'<path d="{path}" fill="{PHASE_COLOURS[phase]}"><title>{phase}</title></path>')
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
    return f'<svg role="img" aria-label="{label}" {box}>{"".join(parts)}</svg>'


def _bar(x: float, y: float, width: float, later: bool) -> str:
    """A rectangle as a part of a path; thinner than a pixel it would not be seen."""
    width, tall = max(width, 0.6), 8 if later else 14
    return f"M{x:.1f} {y:.0f}h{width:.1f}v{tall}h-{width:.1f}z"
