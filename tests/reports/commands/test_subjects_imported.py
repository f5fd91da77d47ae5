"""A subject that cannot be imported, has no cases or is empty: one sentence, wherever it is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shardproof.rooms import HOME
from tests.harness.command_line import CommandLine

BROKEN = {
    "syntax": ("def subject(case, device)\n", "SyntaxError: expected ':' (broken_syntax.py, line 1)"),
    "missing": ("import no_such_module\n", "No module named 'no_such_module'"),
    "missing_below": ("import os.no_such_module\n", "No module named 'os.no_such_module'"),
    "raising": ("raise ValueError('wrong\\nin two lines')\n", "ValueError: wrong ..."),
    "leaving": ("import sys\nsys.exit(3)\n", "SystemExit: 3"),
    "empty": ("", "it defines nothing; legal: subject(case, device) in it, as `shardproof new-subject FILE` writes"),
}
IN_A_CHILD = """
import multiprocessing, os, sys
import torch
import torch.distributed as dist

CHILD = multiprocessing.parent_process() is not None or sys.argv[0] == "-c"
if CHILD:
    {how}

def subject(case, device):
    loss = torch.ones((), dtype=torch.float64) / dist.get_world_size()
    dist.all_reduce(loss)
    return {{"loss/0": loss}}

subject.words, subject.truth = {{"width": 4}}, "alone"
"""


def shardproof(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The command in this folder, in a process of its own."""
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={"PYTHONPATH": str(HOME), "PATH": str(Path(sys.executable).parent), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )


@pytest.mark.parametrize("how", BROKEN)
def test_what_cannot_be_imported_is_one_sentence(shardproof_here: CommandLine, how: str) -> None:
    program, told = BROKEN[how]
    Path(f"broken_{how}.py").write_text(program)
    for words in (("run", "tp=2", "--engine", "dry"), ("faults",)):
        assert told in shardproof_here.refused(*words, "--subject", f"broken_{how}:subject")


@pytest.mark.parametrize(
    ("words", "how"),
    [(("run", "tp=2", "--engine", "pool"), "import no_such_module"), (("faults", "tp=2"), "sys.exit(3)")],
    ids=["pool", "faults"],
)
def test_what_only_a_child_cannot_import_is_one_sentence(tmp_path: Path, words: tuple[str, ...], how: str) -> None:
    (tmp_path / "broken.py").write_text(IN_A_CHILD.format(how=how))
    done = shardproof(tmp_path, "-m", "shardproof", *words, "--subject", "broken:subject")
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "name 'broken:subject': broken fails on import: " in done.stderr


def test_what_launched_ranks_cannot_import_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(IN_A_CHILD.format(how="import no_such_module"))
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "shardproof", "run", "tp=2")
    done = shardproof(tmp_path, *launcher, "--engine", "torchrun", "--subject", "broken:subject")
    ours = done.stderr.partition("torch/distributed/elastic")[0]
    assert "broken fails on import: No module named 'no_such_module'" in ours and "Traceback" not in ours, done.stderr


def test_own_words_without_cases_run_the_cases_that_are_given(shardproof_here: CommandLine) -> None:
    Path("own_words_alone.py").write_text(IN_A_CHILD.format(how="pass"))
    status, out, _ = shardproof_here("run", "tp=2 width=5", "--subject", "own_words_alone:subject")
    assert status == 0 and "tp=2 width=5" in out
    rule = "has words of its own, so a case must be given, or named in its attribute cases"
    assert rule in shardproof_here.refused("run", "--subject", "own_words_alone:subject")


@pytest.mark.parametrize("case", ["tp=1", "tp=2"])
def test_a_subject_that_returns_nothing_is_told_once(shardproof_here: CommandLine, case: str) -> None:
    name = f"nothing_of_{case.replace('=', '_')}"
    Path(f"{name}.py").write_text("def subject(case, device):\n    return {}\n")
    status, out, _ = shardproof_here("run", f"{case} layers=1 seq=8", "--subject", f"{name}:subject")
    assert status == 1 and out.count("fail: ") == 1, out
    told = out.partition("fail: ")[2]
    assert "what:   nothing checkable: it returned nothing; the truth has" in told
    assert "causes: names that are not the canonical ones (loss/<step>, grad/<parameter>, ...), or a subject" in told


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("nowhere.py",), "program=nowhere.py: cannot be opened (No such file or directory)"),
        (("broken.py",), "program=broken.py: SyntaxError: expected ':' (broken.py, line 1)"),
        (("-m", "nowhere.at_all"), "program=nowhere.at_all: there is no module 'nowhere'"),
    ],
)
def test_a_program_that_cannot_begin_is_one_sentence_of_record(
    tmp_path: Path, words: tuple[str, ...], told: str
) -> None:
    (tmp_path / "broken.py").write_text("def subject(case, device)\n")
    done = shardproof(tmp_path, "-m", "shardproof.record", *words)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and told in done.stderr, done.stderr
    assert not (tmp_path / "runs").exists()
