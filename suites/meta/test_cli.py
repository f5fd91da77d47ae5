"""The command line: exit statuses, one message for every wrong request, and what a run prints and leaves behind.

Runs use the loop engine and the toy subjects of the runner's tests: one rank, nothing to communicate.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from harness import run as harness_run
from harness.resolve import resolve
from parallel.subject import subject
from reference.case import Case
from reference.rules import MODES
from reports import cli, frames, show
from reports import run as run_command
from suites.meta import sample_run
from suites.meta.toy_subjects import right

TOY = "suites.meta.toy_subjects:"
ONE = "mode=tp tp=1 layers=1 hidden=16 heads=2 vocab=24 seq=8 micro=1 steps=1"
Printed = tuple[int, str, str]
"""Exit status, stdout, stderr."""


def interrupting(case: Case, device: torch.device) -> Mapping[str, Tensor]:
    """The user presses Ctrl-C in the second case."""
    if case.seed == 1:
        raise KeyboardInterrupt
    return right(case, device)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return sample_run.write(tmp_path / "stored", failing=True)


class CommandLine:
    """Calls the command line in a folder of its own and hands back what it printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *words: str) -> Printed:
        """One command."""
        self._capsys.readouterr()
        status = cli.main(words)
        printed = self._capsys.readouterr()
        return status, printed.out, printed.err

    def refused(self, *words: str) -> str:
        """The one message of a wrong request: status 2, nothing on stdout, no traceback."""
        status, out, err = self(*words)
        assert (status, out) == (2, ""), err
        assert "Traceback" not in err
        assert err.count("\n") == 1 and err.startswith("shardproof"), err
        return err


@pytest.fixture
def shardproof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    monkeypatch.setitem(harness_run.ENGINES, "inproc", f"{TOY}LoopEngine")
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    monkeypatch.chdir(tmp_path)
    return CommandLine(capsys)


# What a run says and leaves


def test_a_right_subject_ends_with_zero_one_table_and_a_complete_folder(shardproof: CommandLine) -> None:
    status, out, err = shardproof("run", ONE, "--subject", f"{TOY}right")
    assert status == 0
    assert out.count("verdict") == 1, "one table"
    row = next(line for line in out.splitlines() if line.startswith("tp "))
    assert row.split()[1] == "1" and " pass " in row
    assert "[1/1] pass" in err
    latest = Path("runs/latest")
    names = {path.name for path in latest.iterdir()}
    assert names == {
        "env.json",
        "cases.jsonl",
        "ledger.csv",
        "summary.csv",
        "verdicts.jsonl",
        "timings.csv",
        "report.html",
    }
    assert latest.resolve().name in out, "says where it is"
    assert frames.load(latest).notes == ()
    assert "1 pass" in (latest / "report.html").read_text()


def test_a_failed_check_ends_with_one_and_prints_six_lines(shardproof: CommandLine) -> None:
    status, out, _ = shardproof("run", ONE, "--subject", f"{TOY}wrong")
    assert status == 1
    for label in ("what:", "where:", "error:", "first:", "causes:", "repeat:"):
        assert f"\n{label}" in out
    assert f"--subject {TOY}wrong" in out, "the command that repeats it"
    assert "What went wrong" in Path("runs/latest/report.html").read_text()


def test_a_machine_that_fails_ends_with_three(shardproof: CommandLine) -> None:
    status, out, _ = shardproof("run", f"{ONE} seed=13", "--subject", f"{TOY}dying")
    assert status == 3
    assert "the machine failed: rank 0 ended with status 9" in out


def test_a_subject_that_takes_no_case_ends_with_two_and_its_reason(shardproof: CommandLine) -> None:
    status, out, _ = shardproof("run", "mode=msp tp=1 delivery=local", "--subject", f"{TOY}limited")
    assert status == 2
    assert "skip" in out
    assert "claims the modes" in out


def test_every_argument_is_one_case(shardproof: CommandLine) -> None:
    status, out, err = shardproof("run", ONE, f"{ONE} seed=3", "--subject", f"{TOY}right", "--out", "elsewhere")
    assert status == 0
    assert "[2/2]" in err
    assert list(frames.load("elsewhere/latest").cases["case"]) == [str(Case.parse(t)) for t in (ONE, f"{ONE} seed=3")]


def test_data_goes_to_every_case(shardproof: CommandLine, tmp_path: Path) -> None:
    text = tmp_path / "corpus.txt"
    text.write_text("We hold these truths to be self-evident. " * 40)
    status, _, _ = shardproof("run", ONE, f"{ONE} seed=3", "--data", str(text), "--subject", f"{TOY}right")
    assert status == 0
    assert all(f"data={text}" in case for case in frames.load("runs/latest").cases["case"])


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


def test_the_ci_page_gets_the_table(shardproof: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "summary.md")
    shardproof("run", ONE, "--subject", f"{TOY}right")
    assert "| tp | 1 |" in Path("summary.md").read_text()


def test_ctrl_c_ends_with_130_and_leaves_what_was_finished(shardproof: CommandLine) -> None:
    status, out, err = shardproof("run", ONE, f"{ONE} seed=1", "--subject", "suites.meta.test_cli:interrupting")
    assert status == 130
    assert "Traceback" not in out + err
    assert "shardproof show runs/latest" in err
    run = frames.load("runs/latest")
    assert set(run.verdicts["case"]) == {str(Case.parse(ONE))}
    assert run.notes == ("1 of 2 cases have no verdict: the run was stopped before them",)
    assert shardproof("page")[0] == 0


# Wrong requests: one message that names key, value, rule and something legal


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("mode=tp colour=red", ["colour=red", "is not a word", "mode"]),
        ("mode=zeta", ["mode=zeta", "is not a known word", "tp|tp-sp"]),
        ("tp=two", ["tp=two", "must be a whole number", "tp=1"]),
        ("tp=3", ["ffn=256", "must be a multiple of tp=3", "ffn=258"]),
        ("mode=msp tp=4 kv_heads=4 seq=30", ["seq=30", "splits it over tp=4", "seq=32"]),
        ("nonsense", ["nonsense", "is not a word"]),
    ],
)
def test_a_case_that_cannot_be_is_refused_with_its_rule(shardproof: CommandLine, case: str, words: list[str]) -> None:
    message = shardproof.refused("run", ONE, case)
    for word in words:
        assert word in message
    assert "legal:" in message
    assert not Path("runs").exists(), "before anything runs"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no_colon", "must be written module:object; legal: parallel.subject:subject"),
        ("nowhere.at.all:subject", "there is no module 'nowhere'"),
        (f"{TOY}rihgt", "has no 'rihgt'; legal: suites.meta.toy_subjects:right"),
    ],
)
def test_a_subject_that_cannot_be_found_is_refused(shardproof: CommandLine, name: str, words: str) -> None:
    assert words in shardproof.refused("run", "--subject", name)
    assert words in shardproof.refused("run", ONE, "--subject", name)


@pytest.mark.parametrize("harm", ["missing", "empty", "not text", "a space"])
def test_data_that_cannot_be_read_are_a_wrong_request(shardproof: CommandLine, tmp_path: Path, harm: str) -> None:
    path = tmp_path / {"a space": "a b.txt"}.get(harm, "corpus.jsonl")
    content = {"empty": b"", "not text": b"\xff\xfe{}\n", "a space": b"words"}.get(harm)
    if content is not None:
        path.write_bytes(content)
    message = shardproof.refused("run", ONE, "--data", str(path), "--subject", f"{TOY}right")
    assert f"data={path}" in message
    assert "legal:" in message
    assert shardproof.refused("run", f"{ONE} data={tmp_path}/nowhere.txt").count("nowhere.txt") >= 1
    assert not Path("runs").exists(), "before anything runs"


def test_modes_choose_among_what_the_subject_claims(shardproof: CommandLine) -> None:
    message = shardproof.refused("run", "--modes", "tp-sp,zeta", "--subject", f"{TOY}limited")
    assert "modes=zeta: is not claimed by" in message and "legal: all, or some of tp-sp" in message
    message = shardproof.refused("run", ONE, "--modes", "tp")
    assert "modes=tp" in message and "legal: mode= in the case" in message


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "required: COMMAND"),
        (("compare", "a", "b"), "invalid choice: 'compare' (choose from"),
        (("run", "--engine", "pool"), "invalid choice: 'pool' (choose from"),
        (("run", "--device", "tpu"), "invalid choice: 'tpu' (choose from"),
        (("run", "--profile", "nsys"), "unrecognized arguments: --profile"),
        (("run", "--mode", "tp"), "unrecognized arguments: --mode"),
        (("bench", "--fast"), "unrecognized arguments: --fast"),
        (("show", "a", "b"), "unrecognized arguments: b"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_does_not_exist_is_refused_with_what_does(
    shardproof: CommandLine, words: tuple[str, ...], said: str
) -> None:
    assert said in shardproof.refused(*words)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_device_that_is_not_here_is_refused(shardproof: CommandLine) -> None:
    assert "device=cuda: this machine offers no CUDA device; legal: --device cpu" in shardproof.refused(
        "run", "--device", "cuda"
    )


def test_a_folder_that_cannot_be_written_is_refused(shardproof: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    message = shardproof.refused("run", ONE, "--subject", f"{TOY}right", "--out", "file")
    assert "out=file: the run folder cannot be written" in message


# Without a case


def test_without_a_case_every_claimed_mode_runs_on_two_and_four_ranks() -> None:
    cases = [Case.parse(text) for text in run_command.default_cases(f"{TOY}right", "all")]
    by_mode = {mode: {case.world_size for case in cases if case.mode == mode} for mode in run_command.PLAN}
    assert by_mode == dict.fromkeys(MODES, {2, 4})
    assert {case.dp for case in cases} == {1, 2}
    assert any(case.wp < case.tp for case in cases) and any(case.wp > case.tp for case in cases)
    assert all(case.micro > 1 and case.steps > 1 and case.batch > 1 for case in cases), "no degenerate case"
    assert all(case.data == "" for case in cases), "real text: the sources of Python"


def test_modes_narrow_the_default_cases() -> None:
    chosen = run_command.default_cases("parallel.subject:subject", "tp,tp-sp")
    assert [Case.parse(text).mode for text in chosen] == ["tp"] * 3 + ["tp-sp"] * 3


def test_every_mode_that_our_subject_claims_has_default_cases() -> None:
    cases = run_command.default_cases(cli.SUBJECT, "all")
    assert {Case.parse(text).mode for text in cases} == set(subject.modes)
    assert not [reason for text in cases if (reason := subject.refuses(Case.parse(text)))]


# The benchmarks


def measured(arguments: list[str]) -> int:
    """Stands for the benchmarks: says what it was given and fails."""
    print("measured", arguments)
    return 1


def test_bench_hands_over_to_the_benchmarks(shardproof: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert callable(resolve(run_command.BENCH)), "the real ones are where the command looks"
    monkeypatch.setattr(run_command, "BENCH", "suites.meta.test_cli:measured")
    assert shardproof("bench") == (1, "measured []\n", "")


# A stored run again


def test_show_prints_the_tables_and_the_failures(shardproof: CommandLine, folder: Path) -> None:
    status, out, _ = shardproof("show", str(folder))
    assert status == 0
    assert "reduce_scatter" in out and "expected MiB" in out
    assert sample_run.MESSAGE in out


def test_show_tells_what_a_killed_run_lacks(shardproof: CommandLine, folder: Path) -> None:
    (folder / "summary.csv").unlink()
    status, out, _ = shardproof("show", str(folder))
    assert status == 0
    assert "note: summary.csv lacks 2 of the ledger's cases" in out


@pytest.mark.parametrize("command", ["show", "page"])
def test_a_folder_that_is_no_run_is_refused(shardproof: CommandLine, folder: Path, command: str) -> None:
    assert "run runs/latest: no such folder" in shardproof.refused(command)
    (folder / "verdicts.jsonl").write_text("[1]\n")
    assert "verdicts.jsonl, line 1" in shardproof.refused(command, str(folder))


def test_page_writes_where_it_is_told(shardproof: CommandLine, folder: Path, tmp_path: Path) -> None:
    status, out, _ = shardproof("page", str(folder))
    assert (status, out) == (0, f"{folder}/report.html\n")
    assert shardproof("page", str(folder), "-o", "my.html")[0] == 0
    assert (tmp_path / "my.html").read_text() == (folder / "report.html").read_text()
    assert "-o nowhere/my.html: cannot be written" in shardproof.refused("page", str(folder), "-o", "nowhere/my.html")


# The program itself


def test_a_bug_of_ours_is_told_as_one_and_is_no_failed_check(
    shardproof: CommandLine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(show, "show_run", lambda *_: 1 / 0)
    status, _, err = shardproof("show", str(folder))
    assert status == 3
    assert "ZeroDivisionError" in err and "a bug in shardproof" in err


def test_help_waits_for_neither_torch_nor_pandas() -> None:
    code = (
        "import sys; from reports import cli; cli.main(['run', '--help']); print({'torch', 'pandas'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.endswith("set()\n")
    assert "--subject" in done.stdout


def test_a_reader_that_leaves_early_gets_no_traceback(folder: Path) -> None:
    command = [sys.executable, "-m", "reports.cli", "show", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stderr
        process.stdout.close()
        assert process.wait(60) == 141
        assert process.stderr.read() == ""
