"""The runner: what passes, fails, is skipped or breaks, what is stored of it; by this process and by others.

Ctrl-C is a real signal to a real process: what was finished is stored and printed, and the exit status is 130.
"""

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
import torch
from torch import Tensor

from shardproof.__main__ import main
from shardproof.harness.dense_model import parse_cases
from shardproof.harness.interpreter import interrupted_after
from shardproof.harness.running.engines import ENGINES
from shardproof.harness.running.request import Request
from shardproof.harness.running.run import run_request
from shardproof.harness.subject import resolve_subject
from shardproof.reference.case import Case
from shardproof.reference.training import truth as dense
from shardproof.reports.options import request
from shardproof.reports.stored.frames import load
from tests.forked import started
from tests.harness import toy_subjects
from tests.harness.command_line import ONE, TOY
from tests.harness.proofs import contradicted, ran


@pytest.mark.parametrize(("seeds", "status"), [((13, 1), 3), ((14, 1), 3), ((13, 15), 1), ((1,), 0)])
def test_a_failing_machine_is_no_verdict_and_keeps_what_is_finished(
    seeds: tuple[int, ...], status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ENGINES, "inproc", "tests.harness.toy_subjects:LoopEngine")
    result = ran(tmp_path, f"{TOY}dying", *(f"{ONE} seed={seed}" for seed in seeds))
    assert result.exit_status == status
    stored = load(result.path).verdicts
    assert set(stored["case"].str.extract(r"seed=(\d+)")[0].astype(int)) == set(seeds)
    lost = [verdict for verdict in result.verdicts if verdict.check == "run"]
    assert [verdict.verdict for verdict in lost] == ["unknown"] * len({13, 14} & set(seeds))


def test_skipped_cases_show_their_reason_and_alone_are_no_pass(tmp_path: Path) -> None:
    result = ran(tmp_path, f"{TOY}limited", ONE)
    assert result.exit_status == 2
    (verdict,) = result.verdicts
    assert (verdict.check, verdict.verdict) == ("supported", "skip")
    assert verdict.message == f"{TOY}limited claims the modes tp-sp, not tp"
    mixed = ran(tmp_path, f"{TOY}refusing", f"{ONE} seed=2", f"{ONE} seed=3")
    assert mixed.exit_status == 0
    assert [verdict.message for verdict in mixed.verdicts if verdict.verdict == "skip"] == ["odd seeds bring bad luck"]
    stored = load(mixed.path).verdicts
    assert "odd seeds bring bad luck" in set(stored["message"])


def test_equal_cases_are_run_once_and_the_words_that_repeat_a_run_name_what_is_unusual() -> None:
    assert len(parse_cases(["mode=tp tp=2", "tp=2", "tp=2 mode=tp", "mode=tp-sp"])) == 2
    right = resolve_subject(f"{TOY}right")
    assert Request(cases=(), subject=right).options == ""
    unusual = Request(cases=(), subject=right, engine="pool", device="cuda")
    assert unusual.options == "--engine pool --device cuda"


class Drifting:
    """The dense model; its loss is within rounding of the truth and other bits in each run. Wrong with seed 5."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, case: Case, device: torch.device) -> dict[str, Tensor]:
        """The outcome of a run."""
        self.runs += 1
        outcome = dense.subject(case, device)
        outcome["loss/0"] *= 1 + self.runs * 2.0**-50 + (case.seed == 5)
        return outcome


def test_every_third_case_of_a_run_is_run_twice_and_each_that_fails(tmp_path: Path) -> None:
    cases = [f"{ONE} seed={seed}" for seed in range(1, 6)]
    verdicts: dict[int, list[str]] = {}
    result = ran(tmp_path, Drifting(), *cases, repeat_every=3)
    for verdict in result.verdicts:
        if verdict.verdict == "fail":
            verdicts.setdefault(Case.parse(verdict.case).seed, []).append(verdict.check)
    assert verdicts == {1: ["determinism"], 4: ["determinism"], 5: ["forward"]}
    assert result.notes[-1] == "determinism and recording: 3 cases were run once; alone, each is run twice"
    shapes = ran(tmp_path, f"{TOY}right", *cases, repeat_every=3, engine="dry")
    assert not any("run once" in note for note in shapes.notes), "shapes are run once in any case"
    alone = ran(tmp_path, Drifting(), cases[1])
    assert contradicted(alone) == {"determinism"} and alone.notes[-1:] != result.notes[-1:]


CASES = [f"{ONE} tp={tp} seed={seed}" for seed in range(2) for tp in (1, 2)]


def told(case: Case, device: torch.device) -> dict[str, Tensor]:
    """The dense model; wrong with an odd seed. Writes down in which process it ran."""
    Path(f"{case.seed}.{case.tp}.{os.getpid()}").touch()
    outcome = dense.subject(case, device)
    outcome["loss/0"] *= 1 + case.seed % 2
    return outcome


def in_order(processes: int) -> int:
    """Run in the current folder; prints the cases in the order in which they were reported, and the notes."""
    order: list[str] = []
    request = Request(
        cases=parse_cases(CASES), subject=resolve_subject(f"{__name__}:told"), out=Path("runs"), processes=processes
    )
    result = run_request(request, lambda done, total, case, verdict: order.append(str(case)))
    print(json.dumps([order, *result.notes]))
    return result.exit_status


def test_two_processes_write_the_folder_that_one_writes(tmp_path: Path) -> None:
    folders = []
    for processes in (0, 2):
        (folder := tmp_path / str(processes)).mkdir()
        program = started(in_order, processes, folder=folder)
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
    by_seed = {seed: {one[2] for one in found if one and one[1] == seed} for seed in "01"}
    assert all(len(processes) == 1 for processes in by_seed.values()), "what is one case to the dense model is together"
    assert len(set.union(*by_seed.values())) == 2


HARMFUL = """
import ctypes, os, signal, time
from pathlib import Path
from shardproof.parallel.subject import subject as right
from shardproof.reference.training.truth import truth as dense

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
            time.sleep(1)
    if case.seed == 15:
        ctypes.string_at(0)
    return dense(case, device)

subject.truth = truth
"""


def from_a_shell(*words: str) -> int:
    """A command that owns its process, and so may fork."""
    sys.argv = ["shardproof", *words]
    return main()


def test_a_case_that_ends_its_process_is_named_and_the_others_are_proved(tmp_path: Path) -> None:
    """A truth that never ends in native code is ended from outside."""
    (tmp_path / "my_subject.py").write_text(HARMFUL)
    cases = [f"{ONE} tp=2 seed={seed}" for seed in (14, 1, 11, 12, 13, 15, 2)]  # 14 before there are threads of ranks
    words = ("--when", "0", "--timeout", "3", "--subject", "my_subject:subject")
    too_large = f"{ONE} tp=2 hidden=262144 ffn=1048576 layers=96 seed=3"
    done = started(from_a_shell, "run", *words, *cases, too_large, folder=tmp_path)
    assert done.ended(120) == 1, done.err
    verdicts: dict[str, dict[str, str]] = {}
    messages: dict[str, str] = {}
    for line in (tmp_path / "runs/latest/verdicts.jsonl").read_text().splitlines():
        row = json.loads(line)
        seed = row["case"].rpartition("seed=")[2]
        verdicts.setdefault(seed, {})[row["check"]] = row["verdict"]
        messages[seed] = row["message"]
    assert verdicts["11"] == verdicts["12"] == {"run": "fail"}
    assert verdicts["14"] == verdicts["15"] == {"run": "unknown"}
    for seed in ("1", "2", "13"):
        assert set(verdicts[seed].values()) == {"pass"}, "13 was killed from outside, and passes when it is tried again"
    crash = next(block for block in done.out.split("\n\n") if "seed=11" in block.splitlines()[0])
    assert "killed by SIGSEGV, at my_subject.py:9 in subject; all ranks are threads of one process" in crash
    assert "--engine pool tells which rank it was" in crash
    assert "its process ended with exit status 3" in done.out
    assert re.search(r"the dense model did not finish: killed by SIGSEGV, at my_subject.py:\d+ in truth", done.out)
    assert "time limit of 3 s: the dense model did not end, and could not be interrupted" in messages["14"]
    assert done.out.splitlines()[-1].startswith("8 cases: 3 pass, 2 fail, 2 unknown, 1 skip; ")
    assert verdicts["3"] == {"truth": "skip"} and "and this machine has" in done.out


TWO_LAYERS = "mode=tp tp=1 layers=2 hidden=16 heads=2 vocab=24 seq=8"


def default_run(subject: str, cases: list[str]) -> int:
    """`shardproof run` without cases, when these are the default ones."""
    request.default_cases = lambda *_, **__: parse_cases(cases)
    return from_a_shell("run", "--subject", subject)


def interrupted(folder: Path, program: Callable[..., int], *words: object) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of a program that gets a SIGINT, with its whole group, once its slow part runs."""
    forked = started(program, *words, folder=folder)
    until_s = time.monotonic() + 60
    while not (folder / "started").exists() and forked.process.is_alive() and time.monotonic() < until_s:
        time.sleep(0.05)
    time.sleep(0.3)
    os.killpg(forked.pid, signal.SIGINT)
    status = forked.ended()
    assert (folder / "started").exists(), forked.err
    return status, forked.out, forked.err


def test_a_run_is_reported_whole_when_its_experiments_are_interrupted(tmp_path: Path) -> None:
    """And no script is looked for then."""
    command = ["run", "--subject", f"{__name__}:slow_shrink", TWO_LAYERS, "--emit-repro", "repro.py"]
    status, out, err = interrupted(tmp_path, main, command)
    assert status == 130 and "Traceback" not in err
    assert "\nwhat:" in out and "\nwhen:" not in out and "their lines `when:` are missing" in out
    assert "note: repro.py was not written: interrupted" in out
    assert (tmp_path / "runs" / "latest" / "report.html").exists() and not (tmp_path / "repro.py").exists()


def test_both_processes_of_the_default_run_are_interrupted(tmp_path: Path) -> None:
    if (os.cpu_count() or 1) < 2:
        pytest.skip("one processor: no second process")
    cases = [f"{TWO_LAYERS} seed={seed}" for seed in (2, 1, 3, 4, 5, 6)]
    status, out, err = interrupted(tmp_path, default_run, f"{__name__}:slow_second", cases)
    assert status == 130 and "interrupted" in err and "Traceback" not in err
    verdicts = load(tmp_path / "runs" / "latest").verdicts
    finished = verdicts["case"].nunique()
    assert 1 <= finished <= 5 and set(verdicts["verdict"]) == {"pass"}
    assert len([line for line in out.splitlines() if line.startswith("tp ")]) == finished
    assert not Path(f"/proc/{(tmp_path / 'started').read_text()}").exists(), "the process that proved it is still there"


def test_a_signal_while_a_case_is_stored_comes_after_it() -> None:
    stored = []
    with pytest.raises(KeyboardInterrupt), interrupted_after():
        signal.raise_signal(signal.SIGINT)
        stored.append("all of it")
    assert stored == ["all of it"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def slow_second(case: Case, device: torch.device) -> dict[str, Tensor]:
    """The case of seed 1 does not end by itself."""
    if case.seed == 1:
        _wait()
    return toy_subjects.right(case, device)


def slow_shrink(case: Case, device: torch.device) -> dict[str, Tensor]:
    """Wrong as it is; the smaller case of one layer, which a script is looked for in, does not end by itself."""
    if case.layers == 1:
        _wait()
    return toy_subjects.wrong(case, device)


def _wait() -> None:
    Path("started").write_text(str(os.getpid()))
    time.sleep(40)
