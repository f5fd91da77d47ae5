"""An operator of DTensor that raises on a rank ends the run and not the process, as torch does when the thread ends."""

from __future__ import annotations

import runpy
import subprocess
import sys
import time

import pytest
import torch

from harness.engines.threads.inproc import InprocEngine
from harness.errors import RankRaised
from reference.case import Case
from tests import ROOT

CASE = "micro=3 tp=2 metric=true heads=24 hidden=96 vocab=388 kv_heads=8 ffn=60"


def test_the_process_outlives_the_thread_of_a_rank_in_which_dtensor_raised() -> None:
    command = [sys.executable, "-m", "tests.harness.threads.test_dtensor_raises"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "outlived\n"), done.stderr


if __name__ == "__main__":
    subject = runpy.run_path(str(ROOT / "docs" / "examples" / "dtensor_mlp.py"))["subject"]
    with InprocEngine() as engine, pytest.raises(RankRaised):
        engine.run(lambda rank: subject(Case.parse(CASE), torch.device("cpu")), world_size=2)
    time.sleep(0.5)  # the threads end
    print("outlived")
