"""The action of this repository, step by step in an empty repository, without the steps that need GitHub."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardproof.__main__ import main
from tests import ROOT
from tests.forked import command_served

ACTION: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text())
STEPS = {step["name"]: step for step in ACTION["runs"]["steps"]}
LONGEST_S = 300
SUBJECT = """
import torch
import torch.distributed as dist

def subject(case, device):
    value = torch.ones({elements}, dtype=torch.float64)
    dist.all_reduce(value)
    return {{"loss/0": {loss}}}

subject.truth, subject.words, subject.cases = "alone", {{}}, ("tp=2",)
"""


def run_step(name: str, folder: Path, commands: Path, **inputs: str) -> subprocess.CompletedProcess[str]:
    """The script of a step with these inputs, the defaults of the action for others; `commands` comes first on PATH."""
    given = {word: str(one.get("default", "")) for word, one in ACTION["inputs"].items()} | inputs
    step = STEPS[name]
    words = {key: given[str(text).split("inputs.")[1].split()[0]] for key, text in step.get("env", {}).items()}
    files = {"RUNNER_TEMP": "", "GITHUB_OUTPUT": "output", "GITHUB_STEP_SUMMARY": "summary.md"}
    places = {key: str(folder / "temp" / file) for key, file in files.items()}
    env = {name: os.environ[name] for name in ("HOME", "TMPDIR", "LD_LIBRARY_PATH") if name in os.environ}
    env |= {"PATH": f"{commands}{os.pathsep}{os.environ['PATH']}", "GITHUB_ACTIONS": "true"}
    bash = ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", "-c", step["run"]]
    options: dict[str, Any] = {"cwd": folder, "env": env | places | words, "timeout": LONGEST_S}
    return subprocess.run(bash, capture_output=True, text=True, check=False, **options)


def test_every_input_is_read_and_every_step_that_reads_one_gets_it_as_a_word() -> None:
    text = (ROOT / "action.yml").read_text()
    assert all(f"inputs.{name}" in text for name in ACTION["inputs"])
    scripts = [step["run"] for step in STEPS.values()]
    assert not any("${{" in script for script in scripts), "what a pull request says is never part of a script"


def main_at_once() -> int | None:
    """The command; a run that fails looks for no line `when:`, which takes ten seconds of processes."""
    return main([*sys.argv[1:], *(("--when", "0") if sys.argv[1:2] == ["run"] else ())])


@pytest.fixture(scope="module")
def commands() -> Iterator[Path]:
    with command_served("shardproof", main_at_once) as folder:
        yield folder


def test_the_first_run_stores_a_baseline_and_a_wider_call_fails_with_its_line(tmp_path: Path, commands: Path) -> None:
    (tmp_path / "temp").mkdir()
    source = tmp_path / "mine.py"
    source.write_text(SUBJECT.format(elements=4, loss="torch.ones((), dtype=torch.float64)"))
    names = ("Run cases", "Compare with the baseline", "Tell how long each lane took")
    first = [run_step(name, tmp_path, commands, subject="mine:subject") for name in names]
    assert [one.returncode for one in first] == [0, 0, 0], [one.stderr for one in first]
    assert "::notice::baselines/main was stored" in first[1].stdout
    comment = (tmp_path / "temp" / "comment.md").read_text()
    assert comment.startswith("## shardproof: pass") and re.search(r"- cases: \d+ s\n- comparison: \d+ s", comment)
    assert "run=runs/latest" in (tmp_path / "temp" / "output").read_text()
    source.write_text(SUBJECT.format(elements=8, loss="value.sum()"))
    wider = [run_step(name, tmp_path, commands, subject="mine:subject", cases="tp=2\n") for name in names]
    assert [one.returncode for one in wider] == [1, 1, 0], [one.stdout for one in wider]
    assert wider[0].stderr.count("::error file=mine.py,line=") == 1
    assert wider[1].stderr.count("::error ") == 1 and "payload_bytes 32 -> 64" in wider[1].stderr
    comment = (tmp_path / "temp" / "comment.md").read_text()
    assert "## shardproof: fail" in comment and "## shardproof compare: fail" in comment
    assert (tmp_path / "runs" / "latest" / "compared.html").is_file()
