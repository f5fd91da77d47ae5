"""The commands: what a run prints and leaves behind, its exit statuses, and a stored run printed again."""

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shardproof.harness.resolve import resolve
from shardproof.reference.case import Case
from shardproof.reports.commands import run as run_command
from shardproof.reports.commands import show
from shardproof.reports.stored import frames
from tests.harness.command_line import ONE, TOY, CommandLine
from tests.harness.toy_subjects import right
from tests.reports import sample_run


def interrupting(case: Case, device: torch.device) -> Mapping[str, Tensor]:
    """The user presses Ctrl-C in the second case."""
    if case.seed == 1:
        raise KeyboardInterrupt
    return right(case, device)


def wrong_with_seed_1(case: Case, device: torch.device) -> Mapping[str, Tensor]:
    """The dense model; another loss with seed 1."""
    outcome = dict(right(case, device))
    outcome["loss/0"] = (1 + (case.seed == 1)) * outcome["loss/0"]
    return outcome


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return sample_run.write(tmp_path / "stored", failing=True)


# What a run says and leaves


def test_fail_fast_ends_a_run_after_the_first_case_that_does_not_pass(shardproof: CommandLine) -> None:
    words = [f"{ONE} seed={seed}" for seed in range(3)]
    for more, counts in (
        ((), "2 pass, 1 fail, 0 unknown, 0 skip"),
        (("--fail-fast",), "1 pass, 1 fail, 0 unknown, 0 skip, 1 not run"),
    ):
        status, out, _ = shardproof("run", *words, "--subject", f"{__name__}:wrong_with_seed_1", *more)
        assert status == 1 and out.splitlines()[-1].startswith(f"3 cases: {counts};")
        assert ("note: --fail-fast: 1 of 3 cases were not run" in out) == bool(more)


def test_a_right_subject_ends_with_zero_one_table_and_a_complete_folder(
    shardproof: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "summary.md")
    status, out, err = shardproof("run", ONE, "--subject", f"{TOY}right")
    assert status == 0
    assert out.count("verdict") == 1, "one table"
    row = next(line for line in out.splitlines() if line.startswith("tp "))
    assert row.split()[1] == "1" and " pass " in row
    assert "| tp | 1 |" in Path("summary.md").read_text(), "the page on CI"
    assert err.startswith("[1/1] pass    mode=tp ranks=1 tp=1 layers=1 "), "tp is the default mode"
    latest = Path("runs/latest")
    tables = "ledger.csv summary.csv verdicts.jsonl timings.csv memory.csv"
    assert {path.name for path in latest.iterdir()} == {"env.json", "cases.jsonl", *tables.split(), "report.html"}
    assert latest.resolve().name in out, "says where it is"
    assert frames.load(latest).notes == ()
    assert "1 pass" in (latest / "report.html").read_text()


def test_a_failed_check_ends_with_one_and_prints_six_lines(shardproof: CommandLine) -> None:
    status, out, _ = shardproof("run", ONE, "--subject", f"{TOY}wrong")
    assert status == 1 and "\x1b" not in out
    for label in ("what:", "where:", "error:", "first:", "causes:", "repeat:"):
        assert f"\n{label}" in out
    assert f"--subject {TOY}wrong" in out, "the command that repeats it"
    assert "What went wrong" in Path("runs/latest/report.html").read_text()


def test_what_was_not_checked_or_could_not_be_decided_is_told(shardproof: CommandLine) -> None:
    status, out, _ = shardproof("run", ONE, "--subject", f"{TOY}losses_only")
    assert status == 0
    assert re.search(r"note: \d+ of \d+ tensors of the truth were returned; not returned, so not checked: ", out)
    status, out, _ = shardproof("run", ONE, "--subject", f"{TOY}broken_expectation")
    assert status == 1
    assert f"\nunknown (expectation): {Case.parse(ONE)}\nsubject.expected failed: KeyError" in out
    assert f"\nunknown (expectation): {Case.parse(ONE)}\n" in shardproof("show")[1]


def test_every_argument_is_one_case_and_data_goes_to_all(shardproof: CommandLine) -> None:
    text = Path("corpus.txt").resolve()
    text.write_text("We hold these truths to be self-evident. " * 40)
    words = ("--data", str(text), "--subject", f"{TOY}right", "--out", "elsewhere")
    status, _, err = shardproof("run", ONE, f"{ONE} seed=3", *words)
    assert status == 0 and "[2/2]" in err
    cases = [Case.parse(f"{words} data={text}") for words in (ONE, f"{ONE} seed=3")]
    assert list(frames.load("elsewhere/latest").cases["case"]) == [str(case) for case in cases]


def test_json_is_one_object_and_nothing_else_on_stdout(shardproof: CommandLine) -> None:
    status, out, err = shardproof("run", ONE, f"{ONE} seed=3", "--subject", f"{TOY}wrong", "--json")
    result = json.loads(out)
    assert status == result["exit_status"] == 1
    assert "[2/2]" in err, "progress goes elsewhere"
    first, _ = result["cases"]
    assert (first["case"], first["mode"], first["ranks"], first["verdict"]) == (str(Case.parse(ONE)), "tp", 1, "fail")
    assert first["worst_error"] > first["worst_allowed"] > 0
    assert {failure["verdict"] for failure in result["failures"]} == {"fail"}
    assert all(failure["message"].startswith("what:") for failure in result["failures"])
    assert Path(result["run"]).is_dir()


def test_ctrl_c_ends_with_130_and_leaves_what_was_finished(shardproof: CommandLine) -> None:
    status, out, err = shardproof("run", ONE, f"{ONE} seed=1", "--subject", f"{__name__}:interrupting")
    assert status == 130
    assert "Traceback" not in out + err
    assert "shardproof: interrupted" in err
    assert out.count("\ntp ") == 1 and "  (`shardproof show` prints all tables)" in out, "report.html is not there"
    run = frames.load("runs/latest")
    assert set(run.verdicts["case"]) == {str(Case.parse(ONE))}
    assert run.notes == ("1 of 2 cases have no verdict: the run was stopped before them",)
    assert shardproof("page")[0] == 0


def measured(arguments: list[str]) -> int:
    """Stands for the benchmarks: says what it was given and fails."""
    print("measured", arguments)
    return 1


def test_bench_hands_over_to_the_benchmarks(
    shardproof: CommandLine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert callable(resolve(run_command.BENCH)), "the real one is where the command looks"
    monkeypatch.setattr(run_command, "BENCH", f"{__name__}:measured")
    assert shardproof("bench") == (1, "measured []\n", "")
    assert shardproof("bench", "--out", "there") == (1, "measured ['--out', 'there']\n", "")
    monkeypatch.setattr(run_command, "CHECKOUT", tmp_path)
    status, _, error = shardproof("bench")
    assert status == 2 and "bench: its script is in the repository, not in a wheel" in error


# A stored run again


def test_show_prints_the_tables_and_the_failures(shardproof: CommandLine, folder: Path) -> None:
    status, out, _ = shardproof("show", str(folder))
    assert status == 0
    assert "reduce_scatter" in out and "expected payload" in out
    assert sample_run.MESSAGE in out
    assert shardproof("compare", "--help")[1].endswith("--fail time:10%\n"), "a percentage as it is typed"


def test_a_folder_that_is_no_run_is_refused(shardproof: CommandLine, folder: Path) -> None:
    (folder / "verdicts.jsonl").write_text("[1]\n")
    for command in ("show", "page"):
        assert "run runs/latest: no such folder" in shardproof.refused(command)
        assert "verdicts.jsonl, line 1" in shardproof.refused(command, str(folder))


def test_page_writes_where_it_is_told(shardproof: CommandLine, folder: Path, tmp_path: Path) -> None:
    status, out, _ = shardproof("page", str(folder))
    assert (status, out) == (0, f"{folder}/report.html\n")
    assert shardproof("page", str(folder), "-o", "my.html")[0] == 0
    assert (tmp_path / "my.html").read_text() == (folder / "report.html").read_text()
    assert "-o nowhere/my.html: cannot be written" in shardproof.refused("page", str(folder), "-o", "nowhere/my.html")


def test_a_name_too_long_for_a_file_is_one_sentence(shardproof: CommandLine, folder: Path) -> None:
    long, run = "x" * 5000, str(folder)
    told = f"run {'x' * 80}... (5,000 characters): cannot be looked at (File name too long); legal: a fol"
    for words in (("show", long), ("page", long), ("trace", long), ("compare", long, run), ("compare", run, long)):
        assert told in shardproof.refused(*words), words[0]
    message = shardproof.refused("compare", run, "--save-baseline", "x" * 400)
    rule = "must be a name of at most 100 letters, digits, dots, dashes and underscores, the first none of .-"
    assert f"(400 characters): {rule}; legal: main" in message
    assert "cannot be written (File name" in shardproof("compare", run, "--save-baseline", "m", "--baselines", long)[2]


# The program itself


def test_a_bug_of_ours_is_told_as_one_and_is_no_failed_check(
    shardproof: CommandLine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(show, "show_run", lambda *_: 1 / 0)
    status, _, err = shardproof("show", str(folder))
    assert status == 3
    assert "ZeroDivisionError" in err and "a bug in shardproof" in err


_PROGRAM = """
import sys
from shardproof.reports.commands.cli import main
status = main(["show", sys.argv[1]])
main(["page", sys.argv[1]])
sys.exit("loaded" if "matplotlib" in sys.modules else status)
"""


def test_a_reader_that_leaves_early_gets_no_traceback_and_a_page_loads_no_plotting_library(folder: Path) -> None:
    """A page without a break-even."""
    command = [sys.executable, "-c", _PROGRAM, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stderr
        process.stdout.close()
        assert process.wait(60) == 141
        assert process.stderr.read() == ""
    assert (folder / "report.html").is_file()
