"""Folders with anything in the place of a run: every command gives one sentence and no traceback.

A killed run can be read.

Harm is drawn: bytes cut off, flipped, added, lines doubled, files swapped, emptied or replaced by folders. The suite
draws few of each; `--hypothesis-profile deep` draws many, and kills thirty runs. A run of layout 1 is read whole, one
of a later layout is refused.
"""

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import settings

from harness.run_folder import SCHEMA
from reports.comparing.snapshot import save, side
from reports.stored.files import RunFolderError
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


def with_schema(folder: Path, schema: object) -> Path:
    """The run written by hand, whose layout has this number."""
    sample_run.write(folder, failing=True)
    env = json.loads((folder / "env.json").read_text()) | {"schema": schema}
    (folder / "env.json").write_text(json.dumps(env))
    return folder


def test_a_run_of_the_former_layout_is_read_as_a_whole(shardproof: CommandLine, tmp_path: Path) -> None:
    """Folders had no number, verdicts were not counted and decided nothing, and there was no table of errors."""
    former = str(sample_run.write(tmp_path / "former", failing=True))
    (tmp_path / "former" / "errors.csv").unlink()
    run = load(former)
    assert run.notes == () and "schema" not in run.env and set(run.verdicts["decided"]) == {""}
    status, out, _ = shardproof("show", former)
    assert status == 0 and sample_run.MESSAGE in out
    assert shardproof("page", former, "-o", "page.html")[0] == 0
    assert shardproof("trace", former, "-o", "trace.json")[0] == 0
    assert shardproof("compare", former, former)[0] == 0


@pytest.mark.parametrize("command", ["show", "page", "trace", "compare"])
def test_a_run_of_a_later_layout_is_one_sentence(shardproof: CommandLine, tmp_path: Path, command: str) -> None:
    later = with_schema(tmp_path / "later", SCHEMA + 1)
    message = shardproof.refused(command, str(later))
    rule = f"is the layout of the folder, and this release reads 1 to {SCHEMA}"
    assert f"{later}/env.json: schema={SCHEMA + 1} {rule}; legal: upgrade shardproof" in message


@pytest.mark.parametrize("schema", ["2", 0, -1, 1.5, True, None, [2]])
def test_a_layout_that_is_no_number_is_one_sentence(tmp_path: Path, schema: object) -> None:
    with pytest.raises(RunFolderError, match="schema=.* must be a whole number above 0; legal: 2"):
        load(with_schema(tmp_path / "odd", schema))


@pytest.mark.parametrize("schema", range(1, SCHEMA + 1))
def test_every_layout_so_far_is_read(tmp_path: Path, schema: int) -> None:
    assert load(with_schema(tmp_path / "run", schema)).env["schema"] == schema
