"""Files of planted bugs: how they are read and lines are found; bugs as stand-alone scripts and on every engine."""

import importlib
import re
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

import shardproof
from shardproof.bugs import record, repair
from shardproof.bugs.anchors import AnchorLost, change_sources, find_change, modules_of
from shardproof.bugs.planting import plant_subject, replace_text
from shardproof.bugs.record import FOLDER, Bug, Change, read_bugs
from shardproof.harness.engines.processes.forked.pool import PoolEngine
from shardproof.harness.errors import RequestError
from shardproof.harness.running.proof import prove
from shardproof.reference.case import Case
from shardproof.suites.killing import scripts
from shardproof.suites.mutants.catalogue import GROUPS, MUTANTS, UNSEEN, Mutant
from shardproof.suites.mutants.kill_rows import mutant_killed
from shardproof.suites.session.prover import Prover
from tests import ROOT
from tests.forked import started
from tests.harness.command_line import CommandLine

EXAMPLE = """
# An area.
let TWO = cp=2 seq=48

defaults
  modes tensor | fails forward in forward

first-bug: Somewhere #1: a sum
    is left out
  at room.sums:Sum.total
  - total = add(a, b)  ->  total = a
  - return total
  + if total:
  +     return 2 * total
  + return total
  cases TWO lr=0.1 packed=false where tp>1 | alone of - as not_summed|missing_call

second-bug: Somewhere #2
  at room.sums
  - LIMIT = 3
  + LIMIT = 4
  modes isp(wp!=tp wdp>1) tp
  equivalent nobody reads
    it
"""
SUMS = """
LIMIT = 3


class Sum:
    def total(self, a, b):
        total = add(
            a,
            b,
        )
        return total

    def other(self, a, b):
        total = add(a, b)
        return total
"""


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package `room` with one module."""
    folder = tmp_path / "room"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "sums.py").write_text(SUMS)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "room"]:
        monkeypatch.delitem(sys.modules, name)
    modules_of.cache_clear()
    return folder


def examples(folder: Path) -> tuple[Bug, ...]:
    path = folder / "area.txt"
    path.write_text(EXAMPLE)
    return read_bugs(path, Bug, {"tensor": ("tp", "msp"), "every": ("tp", "msp", "isp")})


def test_a_file_says_what_its_bugs_are(tmp_path: Path) -> None:
    first, second = examples(tmp_path)
    assert (first.name, first.stands_for) == ("first-bug", "Somewhere #1: a sum is left out")
    assert first.suite == {"cp": 2, "seq": 48, "lr": 0.1, "packed": False} and first.condition == "tp>1"
    assert (first.kills, first.alone, first.phase, first.region) == ("forward", True, "forward", "")
    assert first.cause == "not_summed|missing_call" and first.modes == {"tp": "", "msp": ""}
    assert [change.old for change in first.changes] == ["total = add(a, b)", "return total"]
    assert {change.within for change in first.changes} == {"Sum.total"}
    assert second.modes == {"isp": "wp!=tp wdp>1", "tp": ""} and second.equivalent == "nobody reads it"
    assert not second.alone and not second.held_back and second.changes[0].within == ""


def test_a_line_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "area.txt"
    for line in ("  mode tp", "no bug"):
        path.write_text(f"a: b\n  at x\n{line}\n")
        with pytest.raises(ValueError, match=f"area.txt:3: '{line}'"):
            read_bugs(path, Bug, {})
    path.write_text("a: b\n  at x\n  of head|- as\n")
    assert read_bugs(path, Bug, {})[0].region == "head|"


def test_lines_are_found_by_their_words_in_their_function(room: Path) -> None:
    """White space, line breaks and trailing commas may differ; the same lines of another function are left alone."""
    first, second = examples(room)
    text = change_sources("first-bug", first.changes)["room.sums"]
    assert "    def total(self, a, b):\n        total = a\n        if total:\n            return 2 * total\n" in text
    assert text.endswith("        total = add(a, b)\n        return total\n")
    assert "LIMIT = 4" in change_sources("second-bug", second.changes)["room.sums"]


def test_a_function_that_moved_keeps_its_bugs_and_one_command_writes_it_down(
    room: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, _ = examples(room)
    before = change_sources("first-bug", first.changes)["room.sums"].replace("LIMIT = 3", "")
    (room / "sums.py").write_text("LIMIT = 3\n")
    (room / "moved.py").write_text(SUMS.replace("LIMIT = 3", ""))
    modules_of.cache_clear()
    assert change_sources("first-bug", first.changes) == {"room.moved": before}
    assert repair.main(["--dry-run"], room) == 0 and "at room.sums:Sum.total" in (room / "area.txt").read_text()
    assert repair.main([], room) == 0
    assert "area.txt: first-bug: room.sums:Sum.total is now room.moved:Sum.total\n" in capsys.readouterr().out
    assert (room / "area.txt").read_text() == EXAMPLE.replace("room.sums:Sum.total", "room.moved:Sum.total")


def test_a_function_of_another_name_is_found_by_the_command_alone(room: Path) -> None:
    first, _ = examples(room)
    (room / "sums.py").write_text(SUMS[: SUMS.index("    def other")].replace("def total", "def whole"))
    with pytest.raises(AnchorLost, match=r"first-bug: room.sums:Sum.total: the lines to change are not there"):
        change_sources("first-bug", first.changes)
    assert repair.find_moved_places(first) == {"room.sums:Sum.total": "room.sums:Sum.whole"}


def test_a_bug_without_a_place_is_an_error_that_names_it(room: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, _ = examples(room)
    (room / "sums.py").write_text(SUMS.replace("add(", "subtract("))
    with pytest.raises(AnchorLost, match=r"first-bug: room.sums:Sum.total: .* nowhere else: 'total = add\(a, b\)'"):
        change_sources("first-bug", first.changes)
    assert repair.main([], room) == 1
    assert "area.txt: first-bug: room.sums:Sum.total: the lines to change are not there" in capsys.readouterr().err
    (room / "held_back").mkdir()
    (room / "area.txt").rename(room / "held_back" / "area.txt")
    assert repair.main([], room) == 1 and capsys.readouterr().err == "area.txt: a bug that is held back\n"
    (room / "sums.py").write_text(SUMS.replace("return total", "total = add(a, b)", 1))
    with pytest.raises(AnchorLost, match="are there 2 times, must be once"):
        find_change(Change(module="room.sums", within="Sum.total", old="add(a, b)", new=""))


def test_every_bug_has_its_place() -> None:
    """Moves by a refactoring are written down by `python -m shardproof.bugs.repair`; changed lines are written anew."""
    lost: list[str] = []
    away: list[str] = []
    needed: set[str] = set()
    for path in sorted(FOLDER.rglob("*.txt")):
        for bug in read_bugs(path, Bug, {}):
            packages = {change.module.partition(".")[0] for change in bug.changes}
            if lacking := {package for package in packages if find_spec(package) is None}:
                needed |= lacking
                continue
            try:
                texts = change_sources(bug.name, bug.changes)
            except AnchorLost as problem:
                lost.append(str(problem) if not bug.held_back else f"{path.name}: a bug that is held back")
                continue
            away += [bug.name for module in texts if module not in {change.module for change in bug.changes}]
            for module, text in texts.items():
                compile(text, module, "exec")
    assert (lost, away) == ([], [])
    if needed:
        pytest.skip(f"the other bugs have their places; needs {', '.join(sorted(needed))} (extra `peers`)")


def test_a_bug_costs_seven_lines_and_is_package_data() -> None:
    paths = [*FOLDER.rglob("*.txt"), *(ROOT / "tests/reference/data").glob("*.txt")]
    lines = [line for path in paths for line in path.read_text().splitlines()]
    assert len(lines) <= 7 * sum(len(read_bugs(path, Bug, {})) for path in paths)
    assert max(map(len, lines)) <= 120
    assert '"shardproof.bugs" = ["**/*.txt"]' in (ROOT / "pyproject.toml").read_text() and record.files("open")


def test_the_example_of_contributing_is_read_planted_and_killed(prover: Prover, tmp_path: Path) -> None:
    (text,) = re.findall(r"```\n(row-bias-by-halves: .*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    (tmp_path / "example.txt").write_text(text)
    (bug,) = read_bugs(tmp_path / "example.txt", Mutant, GROUPS)
    killed = mutant_killed(bug, "tp", prover.engine)
    assert set(bug.kills.split("|")) <= set(killed.row.killed_by) and killed.row.region_right == "yes", killed


def main_of(script: str) -> None:
    """Run a script in this process."""
    sys.argv = [script]
    runpy.run_path(script, run_name="__main__")


def repeated(script: Path) -> tuple[int, str]:
    """Exit status and output of a script."""
    process = started(main_of, script.name, folder=script.parent.resolve())
    return process.ended(240.0), process.out


def test_a_bug_becomes_a_script_that_repeats_it(shardproof_here: CommandLine) -> None:
    script = Path("norms-not-summed.py")
    status, out, _ = shardproof_here("faults", "--emit-repro", script.stem, ".")
    assert (status, out) == (0, f"{script}\n")
    text = script.read_text()
    assert text.startswith('"""norms-not-summed: B-04, B-06: InternEvo') and "\n+    return is_row(module)" in text
    status, out = repeated(script)
    assert (status, out.splitlines()[-1]) == (1, "reproduced"), out
    mended = Path("mended.py")
    mended.write_text(re.sub(r"'planted': \{.*?\}", "'planted': {}", text, flags=re.DOTALL))
    status, out = repeated(mended)
    assert (status, out.splitlines()[-1]) == (0, "not reproduced"), out


def test_what_no_script_shows_says_why_and_held_back_bugs_have_none(shardproof_here: CommandLine) -> None:
    status, out, _ = shardproof_here("faults", "--emit-repro", "norm-computed-twice", ".")
    assert status == 1 and out.startswith("norm-computed-twice: no script: ")
    with pytest.raises(RequestError, match="emit-repro=gremlins: is no open mutant or variant; legal: all "):
        scripts("gremlins")


def test_a_variant_is_planted_where_the_ranks_are(pool: PoolEngine) -> None:
    case = Case.parse("mode=isp tp=2 layers=2 steps=1 seq=8 heads=4 kv_heads=2 hidden=16 ffn=32 vocab=264")
    right, wrong = (
        prove(one, "shardproof.parallel.subject:subject", pool, explain=False)
        for one in (case, case.but(variant="isp-average"))
    )
    assert (right.verdict, wrong.verdict) == ("pass", "fail")


def test_parallel_has_no_switch_for_a_variant() -> None:
    """A case's variant is known to the code that plants it and to the subject that takes it."""
    folder = ROOT / "parallel"
    files = {path for path in folder.rglob("*.py") if "variant" in path.read_text()}
    assert files == {folder / "subject.py"}


def test_a_planted_copy_leaves_nothing_behind_in_the_package_above() -> None:
    """`from shardproof import parallel` reads an attribute of `shardproof`, which an import of the copy has set."""
    loaded = importlib.import_module("shardproof.parallel.training")
    plant_subject(replace_text("shardproof.parallel.layers.block", "class Norm(", "class Norm(  "))
    assert vars(shardproof)["parallel"] is sys.modules["shardproof.parallel"]
    assert vars(shardproof)["parallel"].training is loaded


def test_the_text_of_every_bug_calls_what_there_is() -> None:
    """Otherwise an AttributeError kills it, and not the bug that it stands for."""
    missing = []
    for bug in (*MUTANTS, *UNSEEN):
        for change in bug.changes:
            known = vars(importlib.import_module(change.module))
            calls = re.findall(r"(?<![\w.])(\w+)\.(\w+)\(", change.new)
            missing += [
                f"{bug.name}: {owner}.{name}"
                for owner, name in calls
                if isinstance(known.get(owner), ModuleType) and not hasattr(known[owner], name)
            ]
    assert not missing
