"""Cases are proved by other processes: the same folder as by one, what is one case to the dense model in one of them; a
case that ends its process, hangs in native code or is too large is told as that, and takes no other along.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor

from harness.cases import parse_cases
from harness.running.request import Request
from harness.running.run import run
from harness.subject import named
from reference.case import Case
from reference.training import subject as dense
from tests.forked import started

CASES = [
    f"mode=tp tp={tp} layers=1 hidden=16 heads=2 vocab=24 seq=8 micro=1 steps=1 seed={seed}"
    for seed in range(4)
    for tp in (1, 2)
]


def told(case: Case, device: torch.device) -> dict[str, Tensor]:
    """The dense model; wrong with an odd seed. Writes down in which process it ran."""
    Path(f"{case.seed}.{case.tp}.{os.getpid()}").touch()
    outcome = dense.subject(case, device)
    outcome["loss/0"] *= 1 + case.seed % 2
    return outcome


def ran(processes: int) -> int:
    """A run in the current folder; prints the cases in the order in which they were told, and the notes."""
    cases, order = parse_cases(CASES), list[str]()
    request = Request(cases=cases, subject=named(f"{__name__}:told"), out=Path("runs"), processes=processes)
    result = run(request, lambda done, total, case, verdict: order.append(str(case)))
    print(json.dumps([order, *result.notes]))
    return result.exit_status


def test_two_processes_write_the_folder_that_one_writes(tmp_path: Path) -> None:
    folders = []
    for processes in (0, 2):
        (folder := tmp_path / str(processes)).mkdir()
        program = started(ran, processes, folder=folder)
        assert program.ended() == 1, program.err
        assert json.loads(program.out) == [[str(Case.parse(text)) for text in CASES]], "in order, and without a note"
        folders.append(folder / "runs" / "latest")
    here, apart = folders
    for name in ("cases.jsonl", "summary.csv", "memory.csv"):
        assert (here / name).read_text() == (apart / name).read_text()
    verdicts, same = (pd.read_json(folder / "verdicts.jsonl", lines=True) for folder in folders)
    pd.testing.assert_frame_equal(verdicts, same)
    assert list(pd.read_csv(apart / "timings.csv")["case"].unique()) == [str(Case.parse(text)) for text in CASES]
    found = [re.fullmatch(r"(\d)\.\d\.(\d+)", path.name) for path in (tmp_path / "2").iterdir()]
    by_seed = {seed: {one[2] for one in found if one and one[1] == seed} for seed in "0123"}
    assert all(len(processes) == 1 for processes in by_seed.values()), "what is one case to the dense model is together"
    assert len(set.union(*by_seed.values())) == 2


SMALL = "mode=tp tp=2 layers=1 hidden=16 heads=2 vocab=24 seq=8 micro=1 steps=1"
HARMFUL = """
import ctypes, os, signal
from pathlib import Path
from parallel.subject import subject as right
from reference.training.subject import truth as dense

def subject(case, device):
    if case.seed == 11:
        ctypes.string_at(0)
    if case.seed == 12:
        os._exit(3)
    if case.seed == 13 and not Path("killed").exists():
        Path("killed").write_text("")
        os.kill(os.getpid(), signal.SIGKILL)
    return right(case, device)

def truth(case, device):
    if case.seed == 14:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])  # as if native code never came back
        while True:
            pass
    if case.seed == 15:
        ctypes.string_at(0)
    return dense(case, device)

subject.truth = truth
"""


ToldBy = tuple[subprocess.CompletedProcess[str], dict[str, dict[str, str]]]


def told_by(folder: Path, *words: str) -> ToldBy:
    """What a command of its own process printed, and the verdicts of its run by case and check."""
    (folder / "my_subject.py").write_text(HARMFUL)
    command = [sys.executable, "-m", "shardproof", "run", "--when", "0", "--subject", "my_subject:subject", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240, check=False)
    found: dict[str, dict[str, str]] = {}
    for line in (folder / "runs/latest/verdicts.jsonl").read_text().splitlines():
        row = json.loads(line)
        found.setdefault(row["case"].rpartition("seed=")[2], {})[row["check"]] = row["verdict"]
    return done, found


def test_a_case_that_ends_its_process_is_named_and_the_others_are_proved(tmp_path: Path) -> None:
    too_large = f"{SMALL} hidden=262144 ffn=1048576 layers=96 seed=3"
    done, verdicts = told_by(tmp_path, *(f"{SMALL} seed={seed}" for seed in (1, 11, 12, 13, 15, 2)), too_large)
    assert (verdicts["11"], verdicts["12"], verdicts["15"]) == ({"run": "fail"}, {"run": "fail"}, {"run": "unknown"})
    for seed in ("1", "2", "13"):
        assert set(verdicts[seed].values()) == {"pass"}, "13 was killed from outside, and passes when it is tried again"
    assert done.returncode == 1
    crash = next(block for block in done.stdout.split("\n\n") if "seed=11" in block.splitlines()[0])
    assert "killed by SIGSEGV, at my_subject.py:9 in subject; all ranks are threads of one process" in crash
    assert "--engine pool tells which rank it was" in crash
    assert "its process ended with exit status 3" in done.stdout
    assert re.search(r"the dense model did not finish: killed by SIGSEGV, at my_subject.py:\d+ in truth", done.stdout)
    assert done.stdout.splitlines()[-1].startswith("7 cases: 3 pass, 2 fail, 1 unknown, 1 skip; ")
    assert verdicts["3"] == {"truth": "skip"} and "and this machine has" in done.stdout


def test_a_truth_in_native_code_that_never_ends_is_ended_from_outside(tmp_path: Path) -> None:
    begin_s = time.monotonic()
    done, verdicts = told_by(tmp_path, f"{SMALL} seed=14", f"{SMALL} seed=1", "--timeout", "6")
    assert verdicts["14"] == {"run": "unknown"} and set(verdicts["1"].values()) == {"pass"}
    assert "time limit of 6 s: the dense model did not end, and could not be interrupted" in done.stdout
    assert done.returncode == 3 and time.monotonic() - begin_s < 200
