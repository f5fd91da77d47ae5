"""`python -m bench.systems`: rows and page agree, and what is not as its row has it fails.

The type checker of torchtitan's own package agrees with our verdict, and is no witness that agrees with anything.
"""

import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import systems
from bench.cells import DEFECT, PASSED, Cell, System, cells
from bench.systems import CANNOT, CHECKS, FAILED, PAGE, Seen, interpreter, judged, key, stored_on
from tests import ROOT

CELLS = list(cells())


def test_the_page_has_every_cell_with_its_result_and_no_other_and_the_readme_their_numbers() -> None:
    row = r"^\|[^|]*\| `(\w+)` \| `([^`]+)` \| (\w+) \| (pass|known defect|cannot run|FAIL)\b"
    assert re.findall(row, PAGE.read_text("utf-8"), re.MULTILINE) == [(*key(cell)[1:], cell.expected) for cell in CELLS]
    assert stored_on(PAGE).keys() == {key(cell) for cell in CELLS if cell.expected == PASSED and cell.kept}
    counts = [sum(cell.expected == result for cell in CELLS) for result in (PASSED, DEFECT, CANNOT)]
    told = "{} cases pass, {} fail in the module of a known defect, and {} cannot run on a CPU".format(*counts)
    assert told in " ".join((ROOT / "README.md").read_text("utf-8").split())


def test_a_file_of_a_system_is_a_short_tutorial_and_every_one_is_in_the_matrix() -> None:
    folder = ROOT / "suites" / "subjects"
    for cell in CELLS:
        assert (folder / f"{cell.subject}.py").read_text("utf-8").count("\n") < 120
    parts = {"__init__", "mcore_parts", "mcore_training", "checkout"}
    shown_elsewhere = {"mlp", "dropout", "megatron", "qwen3"}
    assert {path.stem for path in folder.glob("*.py")} - parts - shown_elsewhere == {cell.subject for cell in CELLS}


OWN = Cell(System("system", ("torch",)), "ddp", "feature", "dp=3")
WRONG = OWN._replace(expected=DEFECT, needle="mlp.router", finding="halved")
RAISES = OWN._replace(expected=CANNOT, needle="required CUDA")
ALL = {check: (PASSED, "") for check in CHECKS}
ROW = {"verdict": PASSED, "forward_calls": 2, "backward_calls": 3, "payload_bytes": 40}
BAD = {"forward": ("fail", "what:   loss/0 differs\nfirst:  forward of mlp.router in step 0")}
ENDS = {
    "run": ("fail", "what:   the subject did not finish: rank 1 of 3 raised TypeError: it required CUDA 11, at f.py:1")
}


@pytest.mark.parametrize(
    ("cell", "verdict", "checks", "stored", "result", "why"),
    [
        (OWN, PASSED, ALL, None, PASSED, ""),
        (OWN, PASSED, ALL, (5, 40), PASSED, ""),
        (OWN, PASSED, ALL, (5, 44), FAILED, "calls and bytes are (5, 40), and on the page (5, 44)"),
        (OWN, PASSED, {**ALL, "update": ("unknown", "")}, None, FAILED, "not compared: update"),
        (OWN, "fail", {**ALL, **BAD}, None, FAILED, "first:  forward of mlp.router"),
        (OWN, "skip", {}, None, FAILED, "the verdict is skip"),
        (WRONG, "fail", {**ALL, **BAD}, None, DEFECT, "halved"),
        (WRONG._replace(needle="mlp.experts"), "fail", {**ALL, **BAD}, None, FAILED, "the verdict is fail"),
        (WRONG, PASSED, ALL, None, FAILED, "the verdict is pass"),
        (RAISES, "fail", ENDS, None, CANNOT, "TypeError: it required CUDA 11"),
        (RAISES, "fail", BAD, None, FAILED, "the verdict is fail"),
        (RAISES, "unknown", ENDS, None, FAILED, "the verdict is unknown"),
    ],
)
def test_a_result_other_than_that_of_the_row_is_a_failure(
    cell: Cell, verdict: str, checks: dict[str, tuple[str, str]], stored: Any, result: str, why: str
) -> None:
    verdicts = [{"check": check, "verdict": found, "message": text} for check, (found, text) in checks.items()]
    seen = judged(cell, {**ROW, "verdict": verdict}, verdicts, stored)
    assert seen.result == result and why in seen.why


class Command:
    """`shardproof run` as the matrix calls it: cases of `bad` fail, and none starts where a case is `refused`."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    def __call__(self, command: list[str], *, cwd: str, **_: Any) -> subprocess.CompletedProcess[str]:
        cases = command[4 : command.index("--subject")]
        self.calls.append(cases)
        if "refused" in cases:
            return subprocess.CompletedProcess(command, 2, "", "width=0: legal: 1")
        found = {case: "fail" if case == "bad" else PASSED for case in cases}
        checks = [
            {"case": case.removesuffix(" micro=3"), "check": check, "verdict": verdict, "message": "what: it differs"}
            for case, verdict in found.items()
            for check in CHECKS
        ]
        Path(cwd, "verdicts.jsonl").write_text("\n".join(map(json.dumps, checks)))
        rows = [{**ROW, "case": case.removesuffix(" micro=3"), "verdict": found[case]} for case in reversed(cases)]
        told = json.dumps({"exit_status": int("bad" in cases), "run": ".", "cases": rows}, indent=2)
        return subprocess.CompletedProcess(command, int("bad" in cases), f"a library prints this\n{told}", "")


def test_a_cell_passes_by_a_command_of_status_0_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    command = Command()
    monkeypatch.setattr(subprocess, "run", command)
    cases = ("dp=3 micro=3", "dp=3 sharded=true", "bad")  # the first has a default, which no output repeats
    seen = {one.cell.case: one.result for one in systems.run([OWN._replace(case=case) for case in cases], {}, "p")}
    assert seen == {"dp=3 micro=3": PASSED, "dp=3 sharded=true": PASSED, "bad": FAILED}
    assert command.calls == [[*cases], [*cases[:2]]]
    (refused,) = systems.run([OWN._replace(case="refused")], {}, "p")
    assert (refused.result, refused.why) == (FAILED, "width=0: legal: 1")
    (other,) = systems.run([OWN], {key(OWN): (5, 41)}, "p")
    assert other.result == FAILED


@pytest.mark.parametrize(("result", "status"), [(PASSED, 0), (FAILED, 1)])
def test_a_failed_cell_is_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, result: str, status: int
) -> None:
    monkeypatch.setattr(systems, "run", lambda group, *_: [Seen(cell, result, "", 1, 2) for cell in group])
    assert systems.main(["--only", "DDP", "--quick", "--out", str(tmp_path / "page.md")]) == status
    assert f"torch DDP: ddp dp=3 bucket_bytes=400 inproc: {result}" in capsys.readouterr().out
    assert f"| `ddp` | `dp=3 bucket_bytes=400` | inproc | {result} |" in (tmp_path / "page.md").read_text()
    assert systems.main(["--only", "jax"]) == 2
    assert "legal: torch DTensor, " in capsys.readouterr().err


def test_a_ledger_is_that_of_its_system(tmp_path: Path) -> None:
    row = "| feature | `ddp` | `dp=3` | inproc | pass | {} | 40 |"
    sections = [f"## {name}\n\n{row.format(calls)}\n" for name, calls in (("older", 5), ("newer", 6))]
    (tmp_path / "page.md").write_text("# Page\n\n" + "\n".join(sections))
    found = {(name, "ddp", "dp=3", "inproc"): (calls, 40) for name, calls in (("older", 5), ("newer", 6))}
    assert stored_on(tmp_path / "page.md") == found


def test_a_system_runs_here_or_in_an_environment_that_is_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[list[str]] = []

    def ended(command: list[str]) -> str:
        made.append(command)
        if command[1:3] == ["-m", "venv"]:
            Path(command[-1]).mkdir()
        return "exit status 1: no network" if "lost==1" in command else ""

    monkeypatch.setattr(systems, "ended", ended)
    version = importlib.metadata.version("hypothesis")
    monkeypatch.setattr(subprocess, "run", lambda asked, **_: subprocess.CompletedProcess(asked, 0, "0.1\n"))
    assert interpreter(System("one", ("hypothesis",)), tmp_path) == (sys.executable, version) and not made
    here = "python{}.{}".format(*sys.version_info)
    assert interpreter(System("one", (f"hypothesis=={version}",), here), tmp_path) == (sys.executable, version)
    assert interpreter(System("one", ("lost==1",)), tmp_path) == ("", "exit status 1: no network")
    made.clear()
    for _ in range(2):
        other = System("one", ("hypothesis==0.1",))  # not the one that is here
        python, told = interpreter(other, tmp_path)
        assert python == str(tmp_path / f"{here}-hypothesis0.1" / "bin" / "python") and told == "0.1"
    assert len(made) == 3
    assert interpreter(System("one", ("hypothesis",), "python3.99"), tmp_path) == ("", "no python3.99 on PATH")


def test_a_system_of_a_checkout_runs_where_its_variable_names_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = System("one", ("hypothesis",), checkout="NO_SUCH_SYSTEM")
    assert interpreter(system, tmp_path) == ("", "NO_SUCH_SYSTEM names no checkout")
    monkeypatch.setenv("NO_SUCH_SYSTEM", str(ROOT))
    head = ["git", "-C", str(ROOT), "log", "-1", "--format=%h"]
    commit = subprocess.run(head, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    assert interpreter(system, tmp_path) == (sys.executable, commit)
    monkeypatch.setenv("NO_SUCH_SYSTEM", str(tmp_path))
    assert interpreter(system, tmp_path) == (sys.executable, "unknown")


def test_a_system_that_is_not_run_is_named_and_what_the_page_has_of_it_stays(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = tmp_path / "page.md"
    page.write_text("head\n\n| system |\n")
    monkeypatch.setattr(systems, "PAGE", page)
    there, lost = OWN.system, System("lost", ("lost==1", "torch"), "python3.99")
    monkeypatch.setattr(systems, "cells", lambda: iter([OWN, OWN._replace(system=lost)]))
    monkeypatch.setattr(systems, "interpreter", lambda system, _: ("p", "2.0") if system == there else ("", "no p"))
    monkeypatch.setattr(systems, "run", lambda group, *_: [Seen(cell, PASSED, "", 1, 2) for cell in group])
    assert systems.main([]) == 0
    assert "lost: not run here: no p\n" in capsys.readouterr().out
    assert "| lost | lost==1 torch | not run here: no p | | | |\n\n## system\n" in page.read_text()
    monkeypatch.setattr(systems, "interpreter", lambda *_: ("p", "2.0"))
    assert systems.main(["--only", "lost"]) == 0
    whole = page.read_text()
    assert "| system | torch 2.0 | 1 | 0 | 0 | 0 |\n| lost | lost 2.0, python3.99 | 1 | 0 | 0 | 0 |\n" in whole
    row = "| feature | `ddp` | `dp=3` | inproc | pass | 1 | 2 |\n"
    assert re.findall(r"^## (.+)$", whole, re.MULTILINE) == ["system", "lost"] and whole.count(row) == 2
    monkeypatch.setattr(systems, "interpreter", lambda *_: ("", "no network"))
    assert systems.main([]) == 0 and page.read_text() == whole


PLANTED = """
import sys
from bench import static_witness
import shardproof.suites.subjects.torchtitan
from torchtitan.protocols.module import Module
Module._redistribute_outputs = lambda module, dims, outputs: outputs  # partial sums stay what they are
sys.exit(static_witness.main("tp=2 dp=2"))
"""


@pytest.mark.deep("a CPU minute, where torchtitan is installed")
@pytest.mark.parametrize(
    ("command", "status", "words"),
    [
        (["-m", "bench.static_witness", "tp=2 dp=2"], 0, "typed"),
        (["-m", "bench.static_witness", "tp=2 dp=2 kind=qwen3"], 0, "typed"),
        (["-c", PLANTED], 1, "SpmdTypeError"),
    ],
)
def test_a_model_has_types_and_without_its_sums_it_has_none(command: list[str], status: int, words: str) -> None:
    pytest.importorskip("torchtitan", reason="needs torchtitan")
    told = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (told.returncode, words in told.stdout) == (status, True), told.stdout + told.stderr
