"""A recorded program as tables and sentences: what `show` prints and the page has in place of verdicts."""

from collections.abc import Callable

import pandas as pd

from reports.printing.text_tables import Table, count, mark, mebibytes, milliseconds, table
from reports.programs import figures, speed
from reports.programs.speed import beside
from reports.stored.files import about_ranks
from reports.stored.frames import Run

NO_CASE = "no case describes this program, so nothing is compared with a dense model: there is no verdict"
_MOST_MODULES = 20


def overview(run: Run) -> Table:
    """The one row of a recorded program."""
    steps = figures.steps(run)
    one = run.ledger.groupby("rank")[["payload_bytes", "wire_bytes"]].sum()
    most = one.max() if len(one) else pd.Series({"payload_bytes": 0, "wire_bytes": 0})
    frame = pd.DataFrame(
        {
            "program": run.cases["case"],
            "ranks": run.cases["world_size"],
            "steps": steps["step"].nunique(),
            "microbatches": steps["microbatches"].max(),
            "calls": run.ledger.groupby("rank").size().max() if len(run.ledger) else 0,
            "payload": most["payload_bytes"],
            "wire": most["wire_bytes"],
            "step_us": speed.step_s(run) * 1e6,
        }
    )
    return table(
        "Recorded program",
        frame,
        (
            ("program", "program", str),
            ("ranks", "ranks", count),
            ("steps", "steps", count),
            ("micro-batches", "microbatches", count),
            ("calls", "calls", count),
            ("payload MiB", "payload", mebibytes),
            ("wire MiB", "wire", mebibytes),
            ("ms a step", "step_us", milliseconds),
        ),
        note="calls and MiB: the rank that has most, all recorded steps; ms a step: the median over steps of the "
        f"slowest rank, from first forward to first forward; {NO_CASE}",
    )


def parts(run: Run) -> dict[str, object]:
    """Parts of the page: overview, findings, traffic."""
    return {"program": overview(run), "findings": figures.findings(run), "traffic": tables(run)}


def tables(run: Run) -> list[Table]:
    """Traffic, modules, ranks and bandwidth; speed and the case beside it where the recording holds what they need."""
    if not len(run.ledger):
        return []
    return [_traffic(run), _modules(run), *_exchanges(run), _ranks(run), *_bandwidth(run), *_speed(run), *_beside(run)]


def _traffic(run: Run) -> Table:
    return table(
        "Calls and bytes",
        figures.traffic(run),
        (
            ("phase", "phase", str),
            ("op", "op", str),
            ("axis", "axis", str),
            ("ranks", "group_size", count),
            ("calls", "calls", count),
            ("a step", "per_step", _half),
            ("payload MiB", "payload_bytes", mebibytes),
            ("wire MiB", "wire_bytes", mebibytes),
            ("ms in calls", "in_calls_us", milliseconds),
        ),
        note="one rank, the one that has most; a step: calls in the median step; wire: what the rank sends (ring "
        "model); ms in calls: mean over ranks, of calls that are waited for at once (0 for others and on GPUs)",
    )


def _exchanges(run: Run) -> list[Table]:
    frame = figures.exchanges(run)
    columns: tuple[tuple[str, str, Callable[[object], str]], ...] = (
        ("module", "region", mark),
        ("phase", "phase", str),
        ("axis", "axis", str),
        ("calls", "calls", count),
        ("rows", "rows", count),
        ("most to rank", "busiest", count),
        ("rows to it", "busiest_rows", count),
        ("MiB to it", "busiest_bytes", mebibytes),
        ("balance", "balance", _three),
        ("worst", "worst", _three),
    )
    note = (
        "of all ranks and recorded steps; balance: rows to that rank over the mean over ranks; worst: the same within "
        "one exchange; which expert of a rank a row is for is not in a call"
    )
    return [table("Rows sent by uneven all-to-alls", frame, columns, note=note)] if len(frame) else []


def _bandwidth(run: Run) -> list[Table]:
    frame = speed.bandwidth(run)
    shown = frame.assign(share=frame["share"] * 100)
    columns: tuple[tuple[str, str, Callable[[object], str]], ...] = (
        ("op", "op", str),
        ("axis", "axis", str),
        ("ranks", "group_size", count),
        ("calls", "calls", count),
        ("GB/s", "gb_s", _three),
        *((("link", "link", mark), ("of link %", "share", _three)) if frame["link"].any() else ()),
    )
    note = (
        "what one rank sends (ring model), 1e9 bytes, over the time inside calls that are waited for at once, waiting "
        "for late ranks included; of link: of what the stated cluster's link gives one rank"
    )
    return [table("Bandwidth", shown, columns, note=note)] if len(frame) else []


def _speed(run: Run) -> list[Table]:
    rows = list(speed.speed(run))
    note = "a step: the median over steps of the slowest rank"
    frame = pd.DataFrame(rows, columns=["what", "much"])
    return [table("Speed", frame, (("what", "what", str), ("how much", "much", str)), note=note)] if rows else []


def _beside(run: Run) -> list[Table]:
    frame, about = beside(run)
    columns = (
        ("op", "op", str),
        ("ranks", "group_size", count),
        ("calls", "calls", _half),
        ("predicted", "predicted_calls", _half),
        ("payload MiB", "payload_bytes", mebibytes),
        ("predicted MiB", "predicted_bytes", mebibytes),
    )
    if not about:
        return []
    frame = frame if len(frame) else pd.DataFrame({name: [] for _, name, _ in columns})
    note = f"rank 0, a step; predicted: the closed form of {run.env['stated']['case']!r}; {about}"
    return [table("Beside its case", frame, columns, note=note)]


def _three(value: object) -> str:
    return "-" if value != value else f"{float(str(value)):.3g}"  # noqa: PLR0124  (NaN)


def _half(value: object) -> str:
    return f"{float(str(value)):g}"


def _modules(run: Run) -> Table:
    frame = figures.by_module(run)
    shown = frame.head(_MOST_MODULES)
    more = f"; {len(frame) - len(shown)} more stand in ledger.csv" if len(frame) > len(shown) else ""
    return table(
        "Modules",
        shown,
        (
            ("module", "folded", mark),
            ("modules", "layers", count),
            ("forward", "forward", count),
            ("backward", "backward", count),
            *_messages(frame),
            ("other", "other", count),
            ("payload MiB", "payload_bytes", mebibytes),
            ("wire MiB", "wire_bytes", mebibytes),
        ),
        note=f"calls and bytes of the rank that has most; numbers in paths are drawn together as *; -: no module{more}",
    )


def _ranks(run: Run) -> Table:
    frame = figures.by_rank(run).assign(latest=lambda rows: rows["latest"] * 100)
    clock = "" if len({str(one.get("clock")) for one in about_ranks(run.path).values()}) == 1 else _NO_CLOCK
    return table(
        "Ranks",
        frame,
        (
            ("rank", "rank", count),
            ("calls", "calls", count),
            *_messages(frame),
            ("async", "async_calls", count),
            ("wire MiB", "wire_bytes", mebibytes),
            ("ms exposed", "exposed_us", milliseconds),
            ("ms late", "late_us", milliseconds),
            ("last %", "latest", _half_percent),
            ("host MiB", "host_bytes", mebibytes),
            ("device MiB", "device_bytes", mebibytes),
        ),
        note="exposed: inside calls that are waited for at once; async: calls whose duration is not known; late: "
        "median time behind the first rank of the group, over collectives; last: share of them in which it came last; "
        f"host and device: most memory of the process{clock}",
    )


def _messages(frame: pd.DataFrame) -> tuple[tuple[str, str, Callable[[object], str]], ...]:
    """The columns of sends and receives, where a program has such messages."""
    return (("send", "send", count), ("recv", "recv", count)) if frame[["send", "recv"]].any(axis=None) else ()


_NO_CLOCK = "; lateness is not known, since ranks are on machines with clocks of their own"


def _half_percent(value: object) -> str:
    return "-" if value != value else f"{float(str(value)):.0f}"  # noqa: PLR0124  (NaN)
