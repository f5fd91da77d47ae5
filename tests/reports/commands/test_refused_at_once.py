"""A wrong word or value is refused before anything is loaded that takes long: no torch, no pandas, no rich."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SLOW = ("torch", "numpy", "pandas", "matplotlib", "rich", "hypothesis")
PROGRAM = f"""
import contextlib, io, json, sys
from shardproof.__main__ import main
for words in json.load(sys.stdin):
    err = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
        status = main(words)
    print(json.dumps([status, err.getvalue(), [name for name in {SLOW} if name in sys.modules]]))
"""
PRINTED = (["help", "case"], ["help", "slice"], ["--help"], ["run", "--help"], ["--version"])
REFUSED = {
    "explain": "invalid choice: 'explain'",
    "doctor --fast": "unrecognized arguments: --fast",
    "run mode=unknown": "mode=unknown: is not a known word",
    "run tp=two": "tp=two: must be a whole number",
    "run tp=3": "ffn=256: must be a multiple of tp=3",
    "run colour=red": "colour=red: is not a word of the case language",
    "run --modes tp,unknown": "modes=unknown: no case has this mode; legal: all, or some of tp,tp-sp,",
    "run --modes tp tp=2": "modes=tp: chooses among the default cases",
    "run --deep tp=2": "deep: chooses more default cases",
    "run --engine steam": "invalid choice: 'steam'",
    "run --subject nowhere.at.all:subject": "there is no module 'nowhere'",
    "run --subject here": "must be written module:object",
    "run --timeout soon": "timeout=soon: must be a number of seconds",
    "run --variant unknown": "variant=unknown: is not a known variant",
    "run --variant isp-average tp=2": "is a deviation of mode=isp, not of mode=tp",
    "run --profile vtune": "profile=vtune: is not a witness",
    "run --profile torch --profile-steps 3": "profile-steps=3: must be FIRST:END",
    "run --profile torch --profile-steps 0:9 steps=1": "has 1 step, counted from 0; legal: 0:1",
    "run --profile-steps 0:1": "there is no --profile",
    "run --preset-experiment gpt5": "preset-experiment=gpt5: is not known",
    "run --data nowhere.txt": "data=nowhere.txt: nowhere.txt: cannot be opened",
    "run --emit-repro nowhere/x.py": "emit-repro=nowhere/x.py: cannot be written",
    "predict mode=unknown": "mode=unknown: is not a known word",
    "predict colour=red": "colour=red: is not a word of the case language",
    "predict tp=2 --cluster unknown": "cluster=unknown: is neither a preset nor a file",
    "predict tp=2 --world 0": "world=0: must be at least 1",
    "predict tp=2 --subject nowhere:subject": "there is no module 'nowhere'",
    "slice family=unknown": "family=unknown: is not a known word",
    "show nowhere": "run nowhere: no such folder",
    "page nowhere": "run nowhere: no such folder",
    "trace nowhere": "run nowhere: no such folder",
    "compare nowhere": "run nowhere: no such folder",
    "compare nowhere there": "no such run folder and no baseline of this name",
    "compare nowhere there --fail sizes:0": "fail=sizes:0: must be WHAT:LIMIT",
    "compare nowhere there --save-baseline a/b": "baseline=a/b: must be a name",
    "faults --timeout 0": "timeout=0: must be a number of seconds",
    "faults --subject nowhere:subject": "there is no module 'nowhere'",
}
"""Words of a command, as they are split at blanks -> what the message holds."""


def answers(requests: list[list[str]], folder: Path) -> list[tuple[int, str, list[str]]]:
    """Exit status, message and the slow packages that are loaded, after each of these commands in one interpreter."""
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(
        command, input=json.dumps(requests), capture_output=True, text=True, check=True, cwd=folder, timeout=120
    )
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


def test_a_wrong_request_loads_nothing_slow(tmp_path: Path) -> None:
    found = answers([words.split() for words in REFUSED], tmp_path)
    for (words, message), (status, err, slow) in zip(REFUSED.items(), found, strict=True):
        assert (status, slow) == (2, []), words
        assert message in err and err.count("\n") == 1, words


def test_help_loads_nothing_slow(tmp_path: Path) -> None:
    assert answers(list(PRINTED), tmp_path) == [(0, "", [])] * len(PRINTED)


def test_what_is_loaded_is_seen(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import torch\n")
    ((status, _, slow),) = answers([["run", "--subject", "slow:subject"]], tmp_path)
    assert status == 2 and "torch" in slow
