"""The figures of a recorded program, or of traces, as frames by name: what the tables show and the page draws."""

import pandas as pd

from shardproof.reports.programs import figures
from shardproof.reports.programs.speed import bandwidth_by_size
from shardproof.reports.programs.unlike import list_unlike_steps
from shardproof.reports.stored.frames import Run


def program_frames(run: Run) -> dict[str, pd.DataFrame]:
    """Frames by name.

    traffic    calls and bytes by phase, op and axis (harness columns; per_step: calls in the median step)
    bandwidth  gb_s by op, axis and, of traces, payload_bytes
    ranks      a row a rank: calls, late_us, latest (share of collectives in which it came last)
    device     a row a rank and step of a trace with kernels: device_us, compute_us, communication_us, exposed_us, share
    steps      a row a step: calls, payload_bytes of the rank that has most; unlike: whether its calls are not those of
               the most typical step
    largest    the three places with the largest payloads: op, axis, phase, region (module), caller (line)
    """
    return {
        "traffic": figures.program_traffic(run),
        "bandwidth": bandwidth_by_size(run),
        "ranks": figures.by_rank(run),
        "device": figures.device_steps(run),
        "steps": _measure_steps(run),
        "largest": figures.largest_payloads(run),
    }


def _measure_steps(run: Run) -> pd.DataFrame:
    events = run.ledger[run.ledger["step"] >= 0]
    by_rank = events.groupby(["step", "rank"]).agg(calls=("op", "size"), payload_bytes=("payload_bytes", figures.total))
    frame = by_rank.groupby("step").agg(calls=("calls", "max"), payload_bytes=("payload_bytes", figures.most))
    return frame.reset_index().assign(unlike=lambda rows: rows["step"].isin(list_unlike_steps(run)))
