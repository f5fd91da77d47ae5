"""Two processes prove the cases of a run: the same folder; what is one case to the dense model is proved by one."""

from __future__ import annotations

import json
import os
import re
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
