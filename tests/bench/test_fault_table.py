"""The fault table: every row is detected on the engine in this process, and a row that is not is shown as such."""

from __future__ import annotations

import csv
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from bench import fault_table
from bench.fault_programs import goes_right, raises
from bench.fault_table import FAULTS, Fault, main, measured, seen
from harness.engines import named as named_engines
from harness.engines.processes.forked.pool import PoolEngine
from harness.engines.threads.inproc import InprocEngine

QUICK = tuple(fault for fault in FAULTS if not fault.clock and not fault.fatal)


class Blind(InprocEngine):
    """An engine that runs something harmless instead, and so sees no fault."""

    def run(self, program: Any, *args: Any, **options: Any) -> list[Any]:
        """The results of the right program."""
        return super().run(goes_right, **options)


class Spoiled(Blind):
    """An engine that answers wrongly after its first fault."""

    def run(self, program: Any, *args: Any, **options: Any) -> list[Any]:
        """Ones, whatever was asked."""
        return [1.0 for _ in super().run(program, **options)]


def test_the_table_asks_what_was_measured_of_other_engines() -> None:
    names = [fault.name for fault in FAULTS]
    assert len(names) == len(set(names)) == 15
    assert all(fault.says for fault in FAULTS), "a message that says anything at all is not yet clear"


def test_no_row_is_silent_or_late_in_process() -> None:
    rows = measured(["inproc"], QUICK)
    assert [row.fault for row in rows] == [fault.name for fault in QUICK]
    assert not [row for row in rows if not row.detected]
    assert not [row for row in rows if row.late], "50 ms, the best of three tries"
    assert {row.allowed_ms for row in rows} == {50.0}


def test_no_row_is_silent_on_real_processes(monkeypatch: pytest.MonkeyPatch, pool: PoolEngine) -> None:
    monkeypatch.setattr(fault_table, "TRIES", 1)
    monkeypatch.setattr(fault_table, "engine_named", lambda _: nullcontext(pool))
    monkeypatch.setattr(fault_table, "LIMIT_S", 30.0)  # for every row here is told without the clock
    rows = measured(["pool"], [fault for fault in FAULTS if not fault.clock])
    assert not [row for row in rows if not row.detected]


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.clock], ids=lambda fault: fault.name)
def test_what_only_the_clock_can_tell_ends_soon_after_the_limit(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault_table, "LIMIT_S", 0.2)
    monkeypatch.setattr("bench.fault_programs.ASLEEP_S", 1.0)
    with InprocEngine() as engine:
        row = seen(engine, fault)
    assert row.detected and not row.late
    place = r"rank 1 (runs|is blocked) at \S*\bfault_programs\.py"
    assert re.search(place, row.message), "of a path that starts where pytest does"


def test_a_rank_that_ends_its_process_is_seen_from_outside(capfd: pytest.CaptureFixture[str]) -> None:
    (row,) = measured(["inproc"], [fault for fault in FAULTS if fault.name == "SIGKILL"])
    assert row.detected and not row.late
    assert row.message.endswith("killed by signal 9 (SIGKILL)")
    assert capfd.readouterr().err == ""


def test_a_silent_row_is_shown_and_fails_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(named_engines.ENGINES, "inproc", f"{__name__}:Blind")
    monkeypatch.setattr(fault_table, "FAULTS", QUICK[:1])
    assert main(["--out", str(tmp_path), "--engines", "inproc"]) == 1
    assert "0 of 1 detected" in capsys.readouterr().out
    with (tmp_path / "faults.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert (row["engine"], row["fault"], row["detected"]) == ("inproc", "a rank raises", "False")
    assert row["message"] == "nothing: the run ended as if all were well"


def test_an_error_that_says_something_else_is_no_detection() -> None:
    with InprocEngine() as engine:
        assert not seen(engine, Fault(name="", program=raises, says="rank 2 of 3 raised")).detected


def test_an_engine_that_is_spoiled_by_a_fault_is_told() -> None:
    with Spoiled() as engine, pytest.raises(RuntimeError, match="not usable after 'a rank raises'"):
        seen(engine, QUICK[0])
