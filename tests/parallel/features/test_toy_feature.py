"""A feature is two files, found by name: a copy of the product with both has it everywhere; without them it has none.

The toy is a learned gain: an axis, a parameter, two words and a collective of its own.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT

ROOMS = ("bench", "bugs", "harness", "parallel", "reference", "reports", "shardproof", "suites")
SMALL = "layers=1 hidden=16 heads=4 kv_heads=4 ffn=32 vocab=389 seq=8 batch=1 micro=2 steps=2 gp=2 gain=true"
DRAWN = """
import json
from hypothesis import HealthCheck, Phase, given, seed, settings
from suites.drawing.strategies import every_word
from reference.case.default_cases import paired_domains
found = []
@seed(0)
@settings(max_examples=60, database=None, deadline=None, phases=(Phase.generate,), suppress_health_check=HealthCheck)
@given(case=every_word("mtp"))
def draw(case):
    found.append((case.gp, case.gain))
draw()
print(json.dumps([found, {word: paired_domains()[word] for word in ("gp", "gain")}]))
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The product with the two files of the toy, as docs/design.md has them."""
    copy = tmp_path_factory.mktemp("copy")
    for room in ROOMS:
        shutil.copytree(ROOT / room, copy / room, ignore=shutil.ignore_patterns("__pycache__"))
    page = (ROOT / "docs/design.md").read_text().split("## Add a feature")[1]
    for path in ("reference/features/gain.py", "parallel/gain.py"):
        (copy / path).write_text(page.split(f"`{path}`:\n\n```python\n")[1].split("```")[0])
    return copy


def told(copy: Path, *command: str) -> str:
    """Output of a command in the copy."""
    ended = subprocess.run([sys.executable, *command], cwd=copy, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_run_proves_it_in_every_company_and_the_page_shows_its_calls(copy: Path) -> None:
    company = ("mode=tp tp=2 recompute=full", "mode=mtp pp=2 layers=2 zero=1 bucket=900", "mode=tp dp=2 zero=3 cp=2")
    cases = [f"{SMALL} {words}" for words in ("mode=mtp tp=2", *company)]
    assert "4 pass, 0 fail, 0 unknown" in told(copy, "-m", "shardproof", "run", *cases, "--out", "runs")
    rows = [json.loads(line) for line in (copy / "runs/latest/verdicts.jsonl").read_text().splitlines()]
    assert [row["verdict"] for row in rows if row["check"] == "ledger"] == 4 * ["pass"]
    told(copy, "-m", "shardproof", "page", "runs/latest")
    assert any("features of all ranks" in path.read_text() for path in (copy / "runs").rglob("*.html"))


def test_a_wrong_gain_is_seen(copy: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    shutil.copytree(copy, wrong, ignore=shutil.ignore_patterns("runs", "__pycache__"))
    path = wrong / "parallel/gain.py"
    path.write_text(path.read_text().replace("(1 + self.weight)", "(1 - self.weight)"))
    ended = subprocess.run(
        [sys.executable, "-m", "shardproof", "run", SMALL], cwd=wrong, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1 and "layers.0" in ended.stdout


def test_help_predict_and_faults_know_it(copy: Path) -> None:
    help_case = " ".join(told(copy, "-m", "shardproof", "help", "case").split())
    assert "gp=1 ranks that split the gain of hidden states; legal: at least 1" in help_case
    assert "order=tp-cp-ep-dp-gp-pp" in help_case
    assert "features of all ranks" in told(copy, "-m", "shardproof", "help", "calls", SMALL)
    assert "gp" in told(copy, "-m", "shardproof", "predict", SMALL)
    lines = told(copy, "-m", "shardproof", "faults", "--quick", f"{SMALL} tp=1").splitlines()
    assert any(re.search(r"all_gather.* gp\b|\bgp .*all_gather", line) for line in lines), lines


def test_it_is_drawn_and_paired(copy: Path) -> None:
    found, paired = json.loads(told(copy, "-c", DRAWN))
    assert {(gp > 1, gain) for gp, gain in found} == {(False, False), (False, True), (True, True)}
    assert paired == {"gp": [1, 2], "gain": [False, True]}


def test_a_word_that_breaks_its_rule_is_one_sentence(copy: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "shardproof", "run", "gp=2"], cwd=copy, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 2
    assert "gp=2: splits a gain, and gain=false has none; legal: gp=1" in ended.stderr


def test_without_its_files_nothing_names_it() -> None:
    named = re.compile(r"\bgp\b|gain\.weight")
    assert not [path for room in ROOMS for path in (ROOT / room).rglob("*.py") if named.search(path.read_text())]
