"""A recorded program as tables and sentences: what `show` prints and the page has in place of verdicts."""

import pandas as pd

from shardproof.reports.printing.text_tables import (
    Columns,
    Table,
    byte_size,
    count,
    mark,
    milliseconds,
    percent,
    table,
    three,
)
from shardproof.reports.programs import figures
from shardproof.reports.programs.program_frames import (
    bandwidth_by_size,
    compare_with_case,
    program_frames,
    step_s,
    tokens_per_second,
)
from shardproof.reports.stored.files import about_ranks
from shardproof.reports.stored.frames import Run

NO_CASE = "no case describes this program, so nothing is compared with a dense model: there is no verdict"
_MOST_MODULES = 20
_MOST_SIZES = 12
_TIMES = {False: "inside calls that are waited for at once", True: "of their kernels, or gloo's rows"}
"""What durations are of, in a recorded program (False) and in a trace (True)."""


def overview_table(run: Run) -> Table:
    """The one row of a recorded program."""
    steps = figures.steps_by_rank(run)
    one = run.ledger.groupby("rank")[["payload_bytes", "wire_bytes"]].agg(figures.total)
    most = one.agg(figures.most) if len(one) else pd.Series({"payload_bytes": 0, "wire_bytes": 0})
    frame = pd.DataFrame(
        {
            "program": run.cases["case"],
            "ranks": run.cases["world_size"],
            "steps": steps["step"].nunique(),
            "microbatches": steps["microbatches"].max(),
            "calls": run.ledger.groupby("rank").size().max() if len(run.ledger) else 0,
            "payload": most["payload_bytes"],
            "wire": most["wire_bytes"],
            "step_us": step_s(run) * 1e6,
        }
    )
    traced = figures.is_traced(run)
    edges = "from begin to begin" if traced else "from first forward to first forward"
    return table(
        "Traced program" if traced else "Recorded program",
        frame,
        (str, "program"),
        (count, "ranks | steps | micro-batches: microbatches | calls"),
        (byte_size, "payload | wire"),
        (milliseconds, "ms a step: step_us"),
        note="calls and bytes: the rank that has most, all recorded steps; ms a step: the median over steps of the "
        f"slowest rank, {edges}; {NO_CASE}",
    )


def parts_of_page(run: Run) -> dict[str, object]:
    """Parts of the page: overview, findings, traffic; frames to draw, of traces."""
    frames = program_frames(run) if figures.is_traced(run) and len(run.ledger) else {}
    told = {"program": overview_table(run), "findings": figures.list_findings(run), "traffic": tables_of_program(run)}
    return told | {"frames": frames}


def tables_of_program(run: Run) -> list[Table]:
    """Traffic, modules, ranks and bandwidth; speed and the case beside it where the recording holds what they need."""
    if not len(run.ledger):
        return []
    first = [_largest_table(run), _traffic_table(run), _modules_table(run), *_exchange_tables(run), _ranks_table(run)]
    return [*first, *_on_device(run), *_bandwidth_tables(run), *_speed_tables(run), *_tables_beside(run)]


def _traffic_table(run: Run) -> Table:
    return table(
        "Calls and bytes",
        figures.program_traffic(run),
        (str, "phase | op | axis"),
        (count, "ranks: group_size | calls"),
        (_short_number, "a step: per_step"),
        (byte_size, "payload: payload_bytes | wire: wire_bytes"),
        (milliseconds, "ms in calls: in_calls_us"),
        note="one rank, the one that has most; a step: calls in the median step; wire: what the rank sends (ring "
        f"model); ms in calls: mean over ranks, {_timed_calls(run)}",
    )


def _timed_calls(run: Run) -> str:
    """Words on the calls whose durations add up."""
    if figures.is_traced(run):
        return "of the kernels, or gloo's rows, of calls, their waiting for other ranks included"
    return "of calls that are waited for at once (0 for others and on GPUs)"


def _exchange_tables(run: Run) -> list[Table]:
    frame = figures.list_exchanges(run)
    if not len(frame):
        return []
    exchanged = table(
        "Rows sent by uneven all-to-alls",
        frame,
        (mark, "module: region"),
        (str, "phase | axis"),
        (count, "calls | rows | most to rank: busiest | rows to it: busiest_rows"),
        (byte_size, "bytes to it: busiest_bytes"),
        (three, "balance | worst"),
        note="of all ranks and recorded steps; balance: rows to that rank over the mean over ranks; worst: the same "
        "within one exchange; which expert of a rank a row is for is not in a call",
    )
    return [exchanged]


def _on_device(run: Run) -> list[Table]:
    frame = figures.on_device(run)
    if not len(frame):
        return []
    timed = table(
        "On the device",
        frame,
        (count, "rank | steps"),
        (milliseconds, "ms a step: device_us | ms computing: compute_us | ms communicating: communication_us"),
        (milliseconds, "ms exposed: exposed_us"),
        (percent, "exposed: share"),
        note="medians over the steps of the profiler, each until the next one begins on the device; exposed: a kernel "
        "communicates and none computes",
    )
    return [timed]


def _largest_table(run: Run) -> Table:
    begins = "; a line is that at which its function begins" if figures.is_traced(run) else ""
    return table(
        "Largest calls",
        figures.largest_payloads(run),
        (str, "op | axis"),
        (byte_size, "bytes each: payload_bytes"),
        (count, "calls"),
        (str, "phase"),
        (mark, "module: region | line: caller"),
        note=f"calls of the rank that has most{begins}",
    )


def _bandwidth_tables(run: Run) -> list[Table]:
    frame = bandwidth_by_size(run)
    if not len(frame):
        return []
    by_size = "bytes each: payload_bytes" if figures.is_traced(run) else ""
    frame = frame.sort_values("wire_bytes", ascending=False, kind="stable").head(_MOST_SIZES) if by_size else frame
    measured = table(
        "Bandwidth",
        frame,
        (str, "op | axis"),
        (count, "ranks: group_size"),
        (byte_size, by_size),
        (count, "calls"),
        (three, "GB/s: gb_s"),
        note=f"what one rank sends (ring model), 1e9 bytes, over the time {_TIMES[bool(by_size)]}, "
        "waiting for late ranks included",
    )
    return [measured]


def _speed_tables(run: Run) -> list[Table]:
    rows = list(tokens_per_second(run))
    frame = pd.DataFrame(rows, columns=["what", "how much"])
    note = "a step: the median over steps of the slowest rank"
    return [table("Speed", frame, (str, "what | how much"), note=note)] if rows else []


def _tables_beside(run: Run) -> list[Table]:
    frame, why_not = compare_with_case(run)
    if not len(frame) and not why_not:
        return []
    compared = table(
        "Beside its case",
        frame,
        (str, "op"),
        (count, "ranks: group_size"),
        (_short_number, "calls | predicted: predicted_calls"),
        (byte_size, "payload: payload_bytes | predicted payload: predicted_bytes"),
        note=why_not or f"rank 0, a step; predicted: the closed form of {run.env['stated']['case']!r}",
    )
    return [compared]


def _short_number(value: object) -> str:
    return f"{float(str(value)):g}"


def _modules_table(run: Run) -> Table:
    frame = figures.by_module(run)
    shown = frame.head(_MOST_MODULES)
    more = f"; {len(frame) - len(shown)} more stand in ledger.csv" if len(frame) > len(shown) else ""
    return table(
        "Modules",
        shown,
        (mark, "module: folded"),
        (count, "modules: layers | forward | backward"),
        _message_columns(frame),
        (count, "other"),
        (byte_size, "payload: payload_bytes | wire: wire_bytes"),
        note=f"calls and bytes of the rank that has most; numbers in paths are drawn together as *; -: no module{more}",
    )


def _ranks_table(run: Run) -> Table:
    frame = figures.by_rank(run).assign(latest=lambda rows: rows["latest"] * 100)
    if figures.is_traced(run):
        return table(
            "Ranks",
            frame,
            (count, "rank | calls"),
            _message_columns(frame),
            (byte_size, "wire: wire_bytes"),
            (milliseconds, "ms in kernels: exposed_us | ms late: late_us"),
            (_whole_percent, "last %: latest"),
            note="late: median time by which the rank's kernel is shorter than the longest one of the group, over "
            "collectives of which every rank left a trace: a kernel waits for the last rank; last: share of them in "
            "which it came last",
        )
    clock = "" if len({str(one.get("clock")) for one in about_ranks(run.path).values()}) == 1 else _NO_CLOCK
    return table(
        "Ranks",
        frame,
        (count, "rank | calls"),
        _message_columns(frame),
        (count, "async: async_calls"),
        (byte_size, "wire: wire_bytes"),
        (milliseconds, "ms exposed: exposed_us | ms late: late_us"),
        (_whole_percent, "last %: latest"),
        (byte_size, "host memory: host_bytes | device memory: device_bytes"),
        note="exposed: inside calls that are waited for at once; async: calls whose duration is not known; late: "
        "median time behind the first rank of the group, over collectives; last: share of them in which it came last; "
        f"host and device: most memory of the process{clock}",
    )


def _message_columns(frame: pd.DataFrame) -> Columns:
    """The columns of sends and receives, where a program has such messages."""
    return count, "send | recv" if frame[["send", "recv"]].any(axis=None) else ""


_NO_CLOCK = "; lateness is not known, since ranks are on machines with clocks of their own"


def _whole_percent(value: object) -> str:
    return "-" if value != value else f"{float(str(value)):.0f}"  # noqa: PLR0124  (NaN)
