"""Whatever lies where a run should be, every command says one sentence and no traceback; a killed run can be read.

Harm is drawn: bytes cut off, flipped, added, lines doubled, files swapped, emptied or replaced by folders. The suite
draws few of each; `--hypothesis-profile deep` draws many, and kills thirty runs.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import settings

from reports.comparing.snapshot import save, side
from reports.stored.frames import load
from tests.harness.command_line import CommandLine
from tests.reports import sample_run

FILES = ("env.json", "cases.jsonl", "ledger.csv", "summary.csv", "verdicts.jsonl", "timings.csv", "memory.csv")
DEEP = settings().max_examples >= 1000


def harm(path: Path, drawn: random.Random) -> str:
    """Do something to a file that no program of ours does; says what."""
    data = path.read_bytes()
    place = drawn.randrange(len(data) or 1)
    what = drawn.choice(("cut", "flip", "insert", "double", "empty", "remove", "folder", "swap", "zeros"))
    if what == "cut":
        path.write_bytes(data[:place])
    elif what == "flip":
        path.write_bytes(data[:place] + bytes([drawn.randrange(256)]) + data[place + 1 :])
    elif what == "insert":
        path.write_bytes(data[:place] + drawn.randbytes(9) + data[place:])
    elif what == "double":
        path.write_bytes(data + data)
    elif what == "empty":
        path.write_bytes(b"")
    elif what == "zeros":
        path.write_bytes(data[:place] + bytes(len(data) - place))
    elif what == "swap":
        path.write_bytes(drawn.choice(sorted(path.parent.iterdir())).read_bytes())
    else:
        path.unlink()
        if what == "folder":
            path.mkdir()
    return f"{what} {path.name} at {place}"


@pytest.mark.parametrize("seed", range(400 if DEEP else 8))
def test_a_harmed_run_is_one_sentence_for_every_command(shardproof: CommandLine, tmp_path: Path, seed: int) -> None:
    drawn = random.Random(seed)
    good = str(sample_run.write(tmp_path / "good", failing=True))
    folder = sample_run.write(tmp_path / "bad", failing=True)
    done = harm(folder / drawn.choice(FILES), drawn)
    commands = [("show", "bad"), ("page", "bad"), ("trace", "bad"), ("compare", good, "bad"), ("compare", "bad")]
    for words in commands if DEEP else drawn.sample(commands, 2):
        status, _, err = shardproof(*words)
        assert status in (0, 1, 2, 3) and (status != 1 or words[0] == "compare"), (done, words, err)
        assert "Traceback" not in err and "bug in shardproof" not in err, (done, words, err)
        assert status != 2 or err.count("\n") == 1, (done, words, err)


@pytest.mark.parametrize("seed", range(200 if DEEP else 4))
def test_a_harmed_baseline_is_one_sentence_or_as_good(shardproof: CommandLine, tmp_path: Path, seed: int) -> None:
    drawn = random.Random(seed)
    good = str(sample_run.write(tmp_path / "good"))
    folder = save(side(good), "main", "baselines")
    done = harm(drawn.choice(sorted(path for path in folder.iterdir() if path.suffix == ".csv")), drawn)
    status, _, err = shardproof("compare", "main", good)
    assert status in (0, 1, 2) and "Traceback" not in err, (done, err)


_RUN = """
import sys
from pathlib import Path
from tests.reports.scale import written
written(Path(sys.argv[1]), 10**6)
"""


@pytest.mark.slow
def test_a_run_killed_at_any_moment_can_be_shown(shardproof: CommandLine, tmp_path: Path) -> None:
    drawn = random.Random(0)
    for number in range(30 if DEEP else 1):
        out = tmp_path / str(number)
        slow = _RUN.replace("written(", "import tests.reports.scale as s; s._PER_CASE = 500; written(")
        with subprocess.Popen([sys.executable, "-c", slow, str(out)]) as writer:
            deadline_s = time.monotonic() + 60
            while not list(out.glob("2*/cases.jsonl")) and time.monotonic() < deadline_s:
                time.sleep(0.01)
            time.sleep(drawn.random())
            writer.send_signal(signal.SIGKILL)
        assert writer.returncode == -signal.SIGKILL
        status, printed, err = shardproof("show", str(out / "latest"))
        assert (status, "Traceback" in err) == (0, False), err
        run = load(out / "latest")
        assert set(run.verdicts["case"]) <= set(run.ledger["case"]), "a case with verdicts is stored completely"
        assert "note: " in printed


def test_many_events_take_bounded_time_and_memory(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.reports.scale", "--events", str(1_000_000 if DEEP else 20_000)]
    # A process of its own: the most memory that this one ever had tells of other tests.
    told = subprocess.run([*command, "--out", str(tmp_path)], check=True, capture_output=True, text=True, timeout=600)
    part, _, _, busy_s, _, _, most_mib, _ = told.stdout.splitlines()[-1].split()
    assert part == "compared"
    assert float(busy_s) < 30
    assert float(most_mib) < 2000
