"""Folders with anything in the place of a run: every command gives one sentence and no traceback.

Harm is drawn: bytes cut off, flipped, added, lines doubled, files swapped, emptied or replaced by folders. The suite
draws few of each; `--hypothesis-profile deep` draws many, and kills thirty runs, which can be read all the same.
"""

import json
import random
import resource
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import settings

from shardproof.harness.ledger import Event, wire_bytes
from shardproof.reports.comparing.comparison import compare
from shardproof.reports.comparing.snapshot import read_side, save_snapshot, snapshot
from shardproof.reports.printing.printable import printable
from shardproof.reports.stored.files import RunFolderError
from shardproof.reports.stored.frames import load
from shardproof.reports.stored.summary import headline, traffic
from tests.forked import started
from tests.harness.command_line import CommandLine
from tests.reports import sample_run

FILES = ("env.json", "cases.jsonl", "ledger.csv", "summary.csv", "verdicts.jsonl", "timings.csv", "memory.csv")
DEEP = settings().max_examples >= 1000


def test_a_file_in_the_place_of_a_folder_names_the_folder_that_it_lies_in(tmp_path: Path) -> None:
    run = sample_run.write(tmp_path / "run")
    (tmp_path / "notes.txt").write_text("nothing")
    for read_it in (load, read_side):
        for file, legal in (
            (run / "env.json", f"its folder, {run}$"),
            (tmp_path / "notes.txt", "a folder that .* wrote"),
        ):
            with pytest.raises(RunFolderError, match=f"is a file, and a run is a folder; legal: {legal}"):
                read_it(str(file))


def harm(path: Path, drawn: random.Random) -> str:
    """Do something to a file that no program of ours does; says what."""
    data = path.read_bytes()
    place = drawn.randrange(len(data) or 1)
    harmed: dict[str, bytes | None] = {
        "cut": data[:place],
        "flip": data[:place] + bytes([drawn.randrange(256)]) + data[place + 1 :],
        "insert": data[:place] + drawn.randbytes(9) + data[place:],
        "double": data + data,
        "empty": b"",
        "zeros": data[:place] + bytes(len(data) - place),
        "swap": drawn.choice(sorted(path.parent.iterdir())).read_bytes(),
        **dict.fromkeys(("remove", "folder")),
    }
    what = drawn.choice([*harmed])
    path.unlink()
    if what == "folder":
        path.mkdir()
    elif (after := harmed[what]) is not None:
        path.write_bytes(after)
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


STEERING = "\x1b]0;title\x07\x1b[2J\r\x9b31m\u202e"
"""Characters that would give a terminal another title, clear it, overwrite its line, turn its text."""


def test_no_command_sends_what_steers_a_terminal(shardproof: CommandLine, tmp_path: Path) -> None:
    """Module, check, case, line of the program and versions of a foreign run hold it; `hang` reads one of its own."""
    folder = sample_run.write(tmp_path / "run", failing=True)
    for file in folder.iterdir():
        escaped = json.dumps(STEERING)[1:-1] if file.suffix in (".json", ".jsonl") else STEERING.replace("\r", "")
        names = ("layers.0.mlp.w1", "seq=64", "linear.py", "shardproof run", "2.13.0", "missing all_reduce")
        text = file.read_text()
        for name in names:
            text = text.replace(name, f"{name}{escaped}")
        file.write_text(text)
    group = {"0": {"name": "0", "desc": STEERING, "ranks": [0, 1]}}
    for rank in (0, 1):
        call = {"process_group": ["0", STEERING], "profiling_name": f"nccl:{STEERING}{rank}", "collective_seq_id": 1}
        dump = {"pg_config": group, "entries": [{**call, "input_sizes": [[4]], "input_dtypes": [STEERING]}]}
        (tmp_path / f"dump_{rank}").write_text(json.dumps(dump))
    seen = 0
    commands = [
        "show run",
        "page run",
        "page run --markdown",
        "compare run",
        "compare run run",
        "trace run",
        "expect run",
    ]
    for words in (*map(str.split, commands), ["hang", "dump_0", "dump_1"], ["show", STEERING]):
        status, out, err = shardproof(*words)
        assert "Traceback" not in err and status in (0, 1, 2), (words, err)
        assert not set(STEERING) & set(out + err) - set(printable(STEERING)), (words, out + err)
        seen += "\\x1b]0;title" in out + err
    assert seen >= 5


@pytest.mark.parametrize("seed", range(200 if DEEP else 4))
def test_a_harmed_baseline_is_one_sentence_or_as_good(shardproof: CommandLine, tmp_path: Path, seed: int) -> None:
    drawn = random.Random(seed)
    good = str(sample_run.write(tmp_path / "good"))
    folder = save_snapshot(read_side(good), "main", "baselines")
    done = harm(drawn.choice(sorted(path for path in folder.iterdir() if path.suffix == ".csv")), drawn)
    status, _, err = shardproof("compare", "main", good)
    assert status in (0, 1, 2) and "Traceback" not in err, (done, err)


_RANKS, _STEPS, _LAYERS = 8, 5, 50
_PHASES = ("forward", "backward")
_CALL = sample_run.events(sample_run.TP, sample_run.CALLS[sample_run.TP])[0]


def many_events(case: str, count: int) -> Iterator[Event]:
    """`count` events of one case: every rank, step and layer forward and backward, over and over."""
    for number in range(count):
        index, rank = divmod(number, _RANKS)
        layer, payload = index % _LAYERS, 4096 * (1 + index % _LAYERS % 7)
        yield replace(
            _CALL,
            case=case,
            world_size=_RANKS,
            rank=rank,
            step=index // (2 * _LAYERS) % _STEPS,
            microbatch=index // (2 * _LAYERS * _STEPS),
            phase=_PHASES[index // _LAYERS % 2],
            region=f"layers.{layer}.mlp.w1",
            group_size=_RANKS,
            payload_bytes=payload,
            wire_bytes=wire_bytes("all_reduce", payload, _RANKS),
            call_index=index,
            duration_us=10.0 + layer,
            group=tuple(range(_RANKS)),
        )


def written(out: Path, count: int, per_case: int) -> Path:
    """A run folder with `count` events, in cases of `per_case`."""
    begins = range(0, count, per_case)
    cases = {f"mode=tp tp=8 seed={begin // per_case}": min(per_case, count - begin) for begin in begins}
    return sample_run.stored(out, cases, ([*many_events(case, share)] for case, share in cases.items()))


def endless(out: str) -> None:
    """A run of more cases than are finished before it is killed."""
    written(Path(out), 10**6, 500)


@pytest.mark.slow
def test_a_run_killed_at_any_moment_can_be_shown(shardproof: CommandLine, tmp_path: Path) -> None:
    drawn = random.Random(0)
    for number in range(30 if DEEP else 1):
        out = tmp_path / str(number)
        writer = started(endless, str(out), folder=tmp_path)
        deadline_s = time.monotonic() + 60
        while not list(out.glob("2*/cases.jsonl")) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        time.sleep(drawn.random())
        writer.send(signal.SIGKILL)
        assert writer.ended() == -signal.SIGKILL
        status, printed, err = shardproof("show", str(out / "latest"))
        assert (status, "Traceback" in err) == (0, False), err
        run = load(out / "latest")
        assert set(run.verdicts["case"]) <= set(run.ledger["case"]), "a case with verdicts is stored completely"
        assert "note: " in printed


def measured(out: str, count: int) -> None:
    """A ledger written, loaded, summarised and compared; prints seconds of the processor and the most MiB it took."""
    run = load(written(Path(out), count, 100_000))
    lines, _ = traffic(run), headline(run)
    assert len(run.ledger) == count and int(lines["calls"].sum()) * _RANKS == count
    new, baselines = snapshot(run), f"{out}/baselines"
    save_snapshot(new, "scale", baselines)
    found = compare(read_side("scale", baselines), new)
    assert found.events.empty and not found.breaches
    print(time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def test_many_events_take_bounded_time_and_memory(tmp_path: Path) -> None:
    """A process of its own measures the memory, since the peak of this process may be that of other tests."""
    process = started(measured, str(tmp_path), 1_000_000 if DEEP else 20_000, folder=tmp_path)
    assert process.ended(600.0) == 0, process.err
    busy_s, most_mib = map(float, process.out.split())
    assert busy_s < 30 and most_mib < 2000
