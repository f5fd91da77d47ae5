"""Two runs compared: every planted change is one fact at its place, equal runs are equal, limits hold or break."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
import pytest

from shardproof.harness.errors import RequestError
from shardproof.reports.comparing.compared_sides import describe_breaches, parse_limits
from shardproof.reports.comparing.compared_tables import events_table
from shardproof.reports.comparing.comparison import Comparison, compare
from shardproof.reports.comparing.snapshot import read_side, save_snapshot
from shardproof.reports.stored.frames import load
from tests.harness.command_line import CommandLine
from tests.reports import sample_run


def compared(base: Path, new: Path, *fail: str) -> Comparison:
    return compare(read_side(str(base)), read_side(str(new)), parse_limits(fail))


@pytest.fixture
def copy(runs: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of the run `right`, to be changed."""
    return shutil.copytree(runs["right"], tmp_path / "run")


@contextmanager
def changed(folder: Path) -> Iterator[pd.DataFrame]:
    """The ledger of a run folder, written back with what is changed in it."""
    ledger = pd.read_csv(folder / "ledger.csv", keep_default_na=False)
    yield ledger
    ledger.to_csv(folder / "ledger.csv", index=False)


# What the issue asks to be shown: 3 steps of 2 micro-batches on 2 ranks; an activation is 4 x 16 float32, 256 bytes


def test_two_runs_of_one_program_are_equal(runs: dict[str, Path]) -> None:
    found = compared(runs["right"], runs["again"], "events:0", "calls:0", "bytes:0", "memory:0")
    assert (len(found.events), found.breaches) == (0, ())
    assert list(found.traffic["calls"]) == list(found.traffic["new_calls"]) == [12, 12]
    assert list(found.traffic["payload_bytes"]) == [12 * 256] * 2


@pytest.mark.parametrize(
    ("way", "fact", "what"),
    [
        ("gather", f"new backward layers.1 all_gather 0 6 0 {6 * 512}", "all_gather of float32 8x16, 512 bytes"),
        ("doubled", f"changed forward layers.0 all_reduce 6 6 {6 * 256} {6 * 512}", "shape 4x16 -> 8x16, payload"),
        ("wider", f"changed backward layers.0 all_reduce 6 6 {6 * 256} {6 * 512}", "dtype float32 -> float64, payload"),
    ],
)
def test_a_change_is_one_fact_in_its_module_and_says_what_changed(
    runs: dict[str, Path], way: str, fact: str, what: str
) -> None:
    found = compared(runs["right"], runs[way])
    (row,) = found.events.to_dict("records")
    names = ("kind", "phase", "region", "op", "base_calls", "new_calls", "base_payload_bytes", "new_payload_bytes")
    assert " ".join(str(row[name]) for name in names) == fact
    assert row["what"] == (f"{what}_bytes 256 -> 512" if what.endswith("payload") else what)
    assert (row["ranks"], row["steps"], row["microbatches"]) == ("0..1", "0..2", "0..1")
    assert len(found.breaches) == 1
    assert list(compared(runs[way], runs["right"]).events["kind"]) == ["gone" if way == "gather" else "changed"]


def test_one_event_on_one_rank_is_told_with_its_rank(runs: dict[str, Path], copy: Path) -> None:
    with changed(copy) as ledger:
        place = "phase == 'backward' and region == 'layers.0' and rank == 1 and step == 2 and microbatch == 1"
        ledger.loc[ledger.query(place).index, "reduce_op"] = "max"
    (fact,) = compared(runs["right"], copy).events.to_dict("records")
    assert (fact["kind"], fact["what"]) == ("changed", "reduce_op sum -> max")
    assert (fact["ranks"], fact["steps"], fact["microbatches"], fact["new_calls"]) == ("1", "2", "1", 1)


def test_layers_are_one_row_and_what_is_only_in_another_micro_batch_has_moved(
    runs: dict[str, Path], copy: Path
) -> None:
    """Both layers talk in float64 from now on, and the last all-reduce of step 0 is issued a micro-batch earlier."""
    with changed(copy) as ledger:
        wide = ledger["phase"] == "forward"
        ledger.loc[wide, "dtype"] = "float64"
        late = "phase == 'backward' and region == 'layers.0' and step == 0 and microbatch == 1"
        ledger.loc[ledger.query(late).index, "microbatch"] = 0
    found = compared(runs["right"], copy)
    rows = found.folded[["kind", "region", "what", "base_calls", "new_calls", "modules"]].to_dict("records")
    assert [tuple(row.values()) for row in rows] == [
        ("changed", "layers.*", "dtype float32 -> float64", 12, 12, 2),
        ("moved", "layers.0", "all_reduce (sum) of float32 4x16, 256 bytes, micro-batch 1 -> 0", 1, 1, 1),
    ]
    assert list(found.events["kind"]) == ["changed", "changed", "moved"], "a row a module for machines"
    assert found.changes == (
        "tp: dtype float32 -> float64 in all_reduce in forward of layers.*; moved all_reduce in backward of layers.0: "
        "as many calls and bytes on a rank",
    )
    assert len(found.breaches) == 2
    assert len(compared(runs["right"], copy, "calls:0").breaches) == 1, "summed too early is no equal call"


def test_calls_in_a_micro_batch_that_the_base_lacks_are_one_more_micro_batch(runs: dict[str, Path], copy: Path) -> None:
    """A gradient sum at the end of each step is then in micro-batch 2, and has moved."""
    base = shutil.copytree(copy, copy.parent / "base")
    for folder, micros in ((base, (0, 1)), (copy, (0, 1, 2))):
        with changed(folder) as ledger:
            once = ledger[ledger["microbatch"] == 0].assign(call_index=1000 + ledger["call_index"])
            more = [once.assign(microbatch=2, call_index=2000 + once["call_index"])] if 2 in micros else []
            sums = once[once["phase"] == "backward"].assign(phase="grad_sync", region="", microbatch=micros[-1])
            for part in (*more, sums):
                for row in part.to_dict("records"):
                    ledger.loc[len(ledger)] = row
    (sentence,) = compared(base, copy).changes
    assert sentence == "tp: one more micro-batch: 12 calls, 3 KiB more on a rank"
    (back,) = compared(copy, base).changes
    assert back == "tp: one fewer micro-batch: 12 calls, 3 KiB less on a rank"
    rows = events_table(compared(base, copy).folded).rows
    assert len(rows) == 3 and max(len("  ".join(row)) for row in rows) <= 120, "the layers are one row, which is short"
    kinds = compared(base, copy).folded.set_index("phase")["kind"]
    assert dict(kinds) == {"forward": "new", "backward": "new", "grad_sync": "moved"}


# Limits


def test_limits_count_what_they_name(runs: dict[str, Path]) -> None:
    def broken(way: str, *fail: str) -> tuple[str, ...]:
        return compared(runs["right"], runs[way], *fail).breaches

    assert broken("wider", "calls:0") == ()
    assert len(broken("wider", "bytes:0")) == 1
    assert len(broken("gather", "calls:0", "bytes:0")) == 2
    assert broken("gather", "calls:6", "bytes:3072", "calls:25%", "bytes:50%") == ()
    assert len(broken("gather", "calls:5", "bytes:3071", "calls:24.9%", "bytes:49.9%")) == 4
    assert broken("wider", "bytes:24%")[0].startswith("bytes:24%: ")


def test_a_limit_that_is_none_is_refused() -> None:
    for text in "bytes weight:0 bytes:-1 bytes:much time:5 wall:1e3% events:1 : time:% calls:0%%".split():
        with pytest.raises(RequestError, match=f"fail={text}.*; legal: ") as caught:
            parse_limits([text])
        assert "\n" not in str(caught.value)


def test_memory_has_a_limit(runs: dict[str, Path], copy: Path) -> None:
    (copy / "memory.csv").write_text((copy / "memory.csv").read_text().replace(",1,1000", ",1,1100"))
    assert compared(runs["right"], copy, "memory:10%").breaches == ()
    assert "1,000 -> 1,100 saved bytes" in compared(runs["right"], copy, "memory:99").breaches[0]


# Times


def test_a_ledger_whose_calls_take_longer_breaks_the_limit_of_time(runs: dict[str, Path], copy: Path) -> None:
    with changed(copy) as ledger:
        ledger.loc[ledger["phase"] == "backward", "duration_us"] *= 1.3
    found = compared(runs["right"], copy, "time:10%")
    (breach,) = found.breaches
    assert breach.startswith("time:10%: tp backward: ") and "mostly in layers." in breach
    (spent,) = found.times.query("phase == 'backward' and measure == 'in calls'").to_dict("records")
    assert [spent[name] for name in ("ratio", "low", "high")] == pytest.approx([1.3] * 3, rel=1e-4)
    assert compared(runs["right"], copy, "events:0").breaches == ()
    assert any("tp backward" in breach for breach in compared(runs["right"], copy, "wall:20%").breaches)


def test_work_before_a_call_is_told_with_its_phase_and_module(runs: dict[str, Path], copy: Path) -> None:
    """20 ms more before every call in the backward of one layer, on every rank."""
    with changed(copy) as ledger:
        late = (ledger["phase"] == "backward") & (ledger["region"] == "layers.1")
        ledger["start_us"] += 20_000.0 * late.groupby(ledger["rank"]).cumsum()
    found = compared(runs["right"], copy, "events:0", "time:100%")
    assert [breach.partition(": ")[2].partition(":")[0] for breach in found.breaches] == ["tp backward"]
    assert "mostly in layers.1" in found.breaches[0]


def test_where_both_measures_say_slower_the_one_that_knows_the_module_is_told() -> None:
    names = ["mode", "phase", "measure", "beside", "ratio", "low", "clock_ratio", "clock_low", "mostly"]
    rows = [("tp", "backward", measure, "forward", 1.3, 1.2, 1.3, 1.2, where) for measure, where in
            (("in calls", "head"), ("elapsed", "layers.1"))]  # fmt: skip
    nothing = pd.DataFrame()
    (told,) = describe_breaches(
        parse_limits(["time:10%"]), nothing, nothing, nothing, pd.DataFrame(rows, columns=names)
    )
    assert told == "time:10%: tp backward: 1.30 times as slow (elapsed) beside forward, mostly in layers.1"


# Other cases, other versions


def renamed(path: Path, to: Path, case: str, mode: str = "tp") -> Path:
    folder = shutil.copytree(path, to)
    old = load(folder).cases["case"].item()
    for file in folder.iterdir():
        file.write_text(file.read_text().replace(old, case).replace(f"{case},tp,", f"{case},{mode},"))
    (folder / "cases.jsonl").write_text(json.dumps({"case": case, "mode": mode, "world_size": 2}) + "\n")
    return folder


def test_what_else_differs_is_told_first(runs: dict[str, Path], copy: Path, tmp_path: Path) -> None:
    found = compared(runs["right"], renamed(runs["right"], tmp_path / "other", "mode=isp tp=2", "isp"))
    assert any(note.startswith("different cases are compared: ") for note in found.notes)
    assert len(found.events) == 0
    env = json.loads((copy / "env.json").read_text())
    env["versions"]["torch"], env["machine"]["cores"] = "2.99", 512
    (copy / "env.json").write_text(json.dumps(env))
    notes = compared(runs["right"], copy).notes
    assert any("different versions are compared: torch" in note and "2.99" in note for note in notes)
    assert any("different machines are compared: cores" in note for note in notes)


def test_a_case_that_the_new_run_lacks_breaks_the_comparison(folder: Path, tmp_path: Path) -> None:
    fewer = shutil.copytree(folder, tmp_path / "fewer")
    for name in ("cases.jsonl", "ledger.csv"):
        lines = (fewer / name).read_text().splitlines(keepends=True)
        (fewer / name).write_text("".join(line for line in lines if "tp-sp" not in line))
    found = f"case {sample_run.TP_SP}: is in {read_side(str(folder)).name} and not in {fewer}"
    assert compared(folder, fewer).breaches == (found,)
    assert compared(fewer, folder).breaches == (), "a case more is no breach, and a note"
    assert any("not compared" in note for note in compared(fewer, folder).notes)


def test_a_run_that_lost_its_ledger_lacks_every_event(runs: dict[str, Path], copy: Path) -> None:
    (copy / "ledger.csv").unlink()
    gone, fresh = compared(runs["right"], copy), compared(copy, runs["right"])
    assert set(gone.events["kind"]) == {"gone"} and set(fresh.events["kind"]) == {"new"}
    assert list(gone.traffic["calls"]) == list(fresh.traffic["new_calls"]) == [12, 12]
    assert any("ledger.csv is missing" in note for note in gone.notes) and gone.breaches


@pytest.mark.parametrize("name", ["ledger.csv", "verdicts.jsonl", "memory.csv"])
def test_a_run_that_was_cut_off_is_no_pass_whatever_the_limit(folder: Path, tmp_path: Path, name: str) -> None:
    """The last calls of such a run are lost, so no number has grown."""
    cut = shutil.copytree(folder, tmp_path / "cut")
    (cut / name).write_bytes((cut / name).read_bytes()[:-4])
    for base, new in ((folder, cut), (cut, folder)):
        breaches = compared(base, new, "calls:99%", "time:99%").breaches
        assert breaches and breaches[0].startswith(f"{cut} was cut off, so that nothing is proved: {name}: its last")
    with pytest.raises(RequestError, match=f"{cut}: was cut off .* so it is no baseline; legal: a whole run"):
        save_snapshot(read_side(str(cut)), "main", str(tmp_path / "baselines"))


def test_nothing_in_common_is_a_wrong_request(folder: Path, tmp_path: Path, runs: dict[str, Path]) -> None:
    with pytest.raises(RequestError, match="has no case in common"):
        compared(folder, renamed(runs["right"], tmp_path / "x", "q", "isp"))


# The command


def test_the_command_says_what_and_where_in_words_and_json_and_ends_with_one(
    shardproof: CommandLine, runs: dict[str, Path]
) -> None:
    assert shardproof("compare", str(runs["right"]), "--save-baseline", "main")[0] == 0
    status, out, _ = shardproof("compare", "main", str(runs["gather"]))
    assert status == 1
    row = next(line for line in out.splitlines() if line.startswith("new "))
    assert row.split() == [
        "new",
        "backward",
        "layers.1",
        "all_gather",
        "of",
        "float32",
        "8x16",
        "tp",
        "+6",
        "+3",
        "KiB",
    ]
    assert out.startswith("tp: new all_gather in backward of layers.1: 6 calls, 3 KiB more on a rank\n")
    assert "exceeds --fail events:0: tp backward layers.1: new all_gather: all_gather of float32 8x16, 512 bytes" in out
    status, out, _ = shardproof("compare", "main", str(runs["again"]))
    assert (status, "no limit is broken: events:0" in out) == (0, True)
    assert out.startswith("tp: no event differs: 24 calls, 6 KiB on a rank\n")
    # Two runs of one machine may differ in time, and then the table says how.
    assert ("times show nothing: no phase is slower or faster" in out) is ("Time of a micro-batch" not in out)
    status, out, _ = shardproof("compare", "main", str(runs["wider"]), "--json")
    found = json.loads(out)
    assert status == 1
    assert found["limits"] == ["events:0"] and len(found["breaches"]) == 1
    assert found["events"][0]["region"] == "layers.0"


def test_one_run_alone_shows_its_modes_side_by_side(shardproof: CommandLine, folder: Path) -> None:
    status, out, _ = shardproof("compare", str(folder))
    assert status == 0
    rows = [line.split() for line in out.splitlines() if line.startswith(("tp  ", "tp-sp "))]
    # tp: 3 + 1 + 2 activations of 4 kB, all-reduced on two ranks; tp-sp: 2 + 2 + 4, half of it on the wire
    assert [row[:3] for row in rows] == [["tp", "2", "tp=2"], ["tp-sp", "2", "tp=2"]]
    assert " ".join(rows[0][3:16]) == "12 KiB 4 KiB 8 KiB 24 KiB 24 KiB 24 KiB 1.50"
    assert " ".join(rows[1][4:16]) == "16 KiB 0 16 KiB 32 KiB 32 KiB 16 KiB 1.00"
