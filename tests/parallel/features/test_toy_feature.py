"""Tests of parallel.subject. A feature is two files, found by name: a copy of the product with both has it everywhere;
without them it has none.

The toy is a learned gain: an axis, a parameter, two words and a collective of its own.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests import FOLDERS, ROOT

SMALL = "layers=1 hidden=16 heads=4 kv_heads=4 ffn=32 vocab=389 seq=8 batch=1 micro=2 steps=1 gp=2 gain=true"
TOLD = """
import inspect, io, json, os, sys
from contextlib import redirect_stderr, redirect_stdout
from hypothesis import HealthCheck, Phase, given, seed, settings
from shardproof.parallel import gain
from shardproof.reference.case.default_cases import paired_domains
from shardproof.__main__ import main
from shardproof.suites.drawing.strategies import every_word

def told(words):
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = main(words)
    return status, out.getvalue(), err.getvalue()

found = []
@seed(0)
@settings(max_examples=60, database=None, deadline=None, phases=(Phase.generate,), suppress_health_check=HealthCheck)
@given(case=every_word("mtp"))
def draw(case):
    found.append((case.gp, case.gain))
draw()
os.cpu_count = lambda: 1  # no second process, which would load torch once more
*right, wrong = json.loads(sys.argv[1])
printed = [told(words) for words in right]
exec(inspect.getsource(gain).replace("(1 + self.weight)", "(1 - self.weight)"), vars(gain))
printed.append(told(wrong))
print(json.dumps([printed, found, {word: paired_domains()[word] for word in ("gp", "gain")}]))
"""
"""Calls every command in one process, the last one with a wrong gain, and draws cases."""


def test_two_files_are_a_feature_in_every_command(tmp_path: Path) -> None:
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True)
    for path in ("reference/features/gain.py", "parallel/gain.py"):
        shutil.copy(ROOT / "docs/examples/feature" / path, tmp_path / path)
    company = ("mode=mtp pp=2 layers=2 zero=1 bucket=900 recompute=full", "mode=tp dp=2 zero=3 cp=2")
    commands = [
        ["run", *(f"{SMALL} {words}" for words in ("mode=mtp tp=2", *company)), "--out", "gained"],
        ["page", "gained/latest"],
        ["help", "case"],
        ["help", "calls", SMALL],
        ["predict", SMALL],
        ["faults", "--quick", f"{SMALL} tp=1 micro=1 steps=1"],
        ["run", "gp=2"],
        ["run", SMALL, "--out", "wrong", "--when", "0"],
    ]
    words = [sys.executable, "-c", TOLD, json.dumps(commands)]
    ended = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    printed, drawn, paired = json.loads(ended.stdout.splitlines()[-1])
    assert [status for status, _, _ in printed] == [0, 0, 0, 0, 0, 0, 2, 1], printed
    run, _, help_case, calls, predicted, faults, _, wrong = (out for _, out, _ in printed)
    assert "3 pass, 0 fail, 0 unknown" in run
    rows = [json.loads(line) for line in (tmp_path / "gained/latest/verdicts.jsonl").read_text().splitlines()]
    assert [row["verdict"] for row in rows if row["check"] == "ledger"] == 3 * ["pass"]
    assert any("features of all ranks" in path.read_text() for path in (tmp_path / "gained").rglob("*.html"))
    assert "gp=1 ranks that split the gain of hidden states; legal: at least 1" in " ".join(help_case.split())
    assert "order=tp-cp-ep-dp-gp-pp" in help_case
    assert "features of all ranks" in calls
    assert "gp" in predicted
    assert re.search(r"^.*(all_gather.* gp\b|\bgp .*all_gather)", faults, flags=re.M), faults
    assert "gp=2: splits a gain, and gain=false has none; legal: gp=1" in printed[6][2]
    assert "layers.0" in wrong
    assert {(gp > 1, gain) for gp, gain in drawn} == {(False, False), (False, True), (True, True)}
    assert paired == {"gp": [1, 2], "gain": [False, True]}


def test_without_its_files_nothing_names_it() -> None:
    named = re.compile(r"\bgp\b|gain\.weight")
    assert not [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if named.search(path.read_text())]
