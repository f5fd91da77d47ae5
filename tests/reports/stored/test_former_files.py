"""Files that an earlier version wrote (commit f027cd1, layout 2) are read: run folder, baseline, checkpoint, failures.

They are of `mode=tp tp=2 layers=1 hidden=8 heads=2 kv_heads=2 ffn=12 vocab=32 seq=6 batch=1 micro=2 steps=1
optimizer=adamw lr=0.01 seed=3 save=checkpoint`, as that version stored it.
"""

import importlib
import shutil
from pathlib import Path

from suites.session.known_failures import read
from tests.harness.command_line import CommandLine

FORMER = Path(__file__).parent / "former"
CASE = (
    "mode=tp tp=2 layers=1 hidden=8 heads=2 kv_heads=2 ffn=12 vocab=32 seq=6 batch=1 micro=2 steps=1"
    " optimizer=adamw lr=0.01 seed=3"
)


def test_a_run_folder_is_shown_and_drawn(shardproof: CommandLine) -> None:
    run = str(FORMER / "run")
    status, out, err = shardproof("show", run)
    assert (status, err) == (0, "")
    assert "1 case: 1 pass, 0 fail, 0 unknown, 0 skip" in out
    assert shardproof("page", run, "-o", "page.html")[0] == shardproof("trace", run, "-o", "trace.json")[0] == 0


def test_a_case_of_today_sends_what_the_baseline_holds(shardproof_here: CommandLine) -> None:
    shutil.copytree(FORMER / "baselines", "baselines")
    assert shardproof_here("run", f"{CASE} save=checkpoint", "--out", "runs")[0] == 0
    for run in (FORMER / "run", "runs/latest"):
        status, out, _ = shardproof_here("compare", "former", str(run), "--fail", "events:0")
        assert status == 0 and "no limit is broken: events:0" in out, out


def test_training_goes_on_from_a_checkpoint(shardproof_here: CommandLine) -> None:
    shutil.copytree(FORMER / "checkpoint", "checkpoint")
    status, out, _ = shardproof_here("run", f"{CASE} load=checkpoint".replace("mode=tp tp=2", "mode=tp-sp tp=2 dp=2"))
    assert status == 0 and "1 pass" in out, out


def test_known_failures_name_tests_that_are_there() -> None:
    entries = read(FORMER / "known-failures.toml")
    assert len(entries) > 10
    for entry in entries:
        file, _, test = entry.test.rstrip("*").partition("::")
        assert hasattr(importlib.import_module(f"suites.{file.removesuffix('.py')}"), test), entry.test
