"""The torchrun engine under its launcher, with the words of two nodes on this machine, and in SLURM's environment.

A start of torchrun costs seconds, so it serves several questions; other ranks are forked.
"""

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from shardproof.__main__ import main
from shardproof.harness.dense_model import parse_cases
from shardproof.harness.diagnosing.explained import repeat_command
from shardproof.harness.running.request import Request
from shardproof.harness.running.run import run_request
from shardproof.harness.subject import resolve_subject
from shardproof.reference.case import Case
from shardproof.reports.commands import cli
from shardproof.reports.stored import frames
from tests import ROOT
from tests.forked import started
from tests.harness.programs.launched import free_port, ran

LIMIT_S = 120.0
TINY = "mode=tp tp=2 layers=1 hidden=16 heads=2 ffn=16 seq=8 micro=1 steps=1"
Ended = tuple[int, str, str]
"""Status, stdout and stderr of a process."""
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "SLURM_", "TORCHELASTIC_", "GROUP_")


def together(program: Callable[..., Any], words: Sequence[str], folder: Path, *ranks: dict[str, str]) -> list[Ended]:
    processes = [started(program, [*words], folder=folder, environment=rank) for rank in ranks]
    return [(process.ended(LIMIT_S), process.out, process.err) for process in processes]


def torchrun(folder: Path, ranks: int, *words: str) -> Ended:
    port = ("--master-addr", "127.0.0.1", "--master-port", free_port())
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), *port, *words]
    done = ran(folder, *command)
    return done.returncode, done.stdout, done.stderr


def slurm(folder: Path, ranks: int, *words: str) -> list[Ended]:
    """A session of pytest as srun starts it."""
    job = {"SLURM_NTASKS": str(ranks), "SLURM_JOB_NODELIST": "localhost", "SLURM_JOB_ID": free_port()}
    places = [{**job, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(ranks)]
    return together(pytest.main, words, folder, *places)


def ledger(run: Path) -> pd.DataFrame:
    """A run's ledger without what differs from run to run."""
    return (
        frames.load(run).ledger.drop(columns=["start_us", "duration_us", "caller"]).astype(str).reset_index(drop=True)
    )


@pytest.mark.slow
def test_two_nodes_prove_a_case_and_rank_0_alone_tells(tmp_path: Path) -> None:
    """The words of torchrun as the agent of each node sets them: the ranks of both nodes are local rank 0."""
    meeting = {"LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    command = ["run", TINY, "--engine", "torchrun", "--out", "there"]
    first, second = together(main, command, tmp_path, *({**meeting, "RANK": rank} for rank in "01"))
    assert first[0] == second[0] == 0, first[2] + second[2]
    assert "pass" in first[1] and "[1/1] pass" in first[2]
    assert second[1] == "" and "shardproof" not in second[2]
    run_request(
        Request(
            cases=parse_cases((TINY,)),
            subject=resolve_subject("shardproof.parallel.subject:subject"),
            out=tmp_path / "here",
        )
    )
    there = ledger(tmp_path / "there" / "latest")
    assert set(there["rank"]) == {"0", "1"}
    pd.testing.assert_frame_equal(there, ledger(tmp_path / "here" / "latest"))


@pytest.mark.slow
def test_what_goes_wrong_is_told_and_the_world_goes_on(tmp_path: Path) -> None:
    names = ("where", "is_killed", "world_size_3", "kills_1")
    status, out, err = torchrun(tmp_path, 2, "-m", "tests.harness.processes.launched_world", *names)
    rows = [json.loads(line) for line in out.splitlines()]
    told = {row["name"]: row for row in rows if row["name"] != "goes_right"}
    assert set(told) == set(names), err
    between = [row for row in rows if row["name"] == "goes_right"]
    assert [row.get("value") for row in between] == [[6.0, 6.0]] * (len(names) - 1), "usable after everything"

    assert told["is_killed"]["error"] == "RankDied"
    assert told["is_killed"]["message"].startswith("rank 1 of 2 died: killed by SIGKILL")
    assert told["is_killed"]["seconds"] < 2

    assert told["world_size_3"]["error"] == "RequestError"

    rule = "world_size 3: must be from 1 to 2, the number of processes that were launched"
    assert rule in told["world_size_3"]["message"]
    assert [row[2:] for row in told["where"]["value"]] == [["2", "0"], ["2", "1"]]

    assert told["kills_1"]["error"] == "RankDied"
    assert told["kills_1"]["message"].startswith("rank 1 of 2 died: its launched process is gone")
    assert status == 1, "torchrun's own word for a world that lost a process"


@pytest.mark.deep("20 CPU seconds")
def test_only_rank_0s_session_draws(tmp_path: Path) -> None:
    suites = str(ROOT / "suites" / "test_forward.py")
    words = (suites, "-q", "-p", "no:cacheprovider", "--engine", "torchrun", "--modes", "tp", "-k", "logits")
    (status, out, err), other = slurm(tmp_path, 2, *words, "--hypothesis-seed=1")
    assert status == 0, out + err
    assert "1 passed" in out
    assert other == (0, "", "")


def test_slurm_serves_as_launcher_and_a_wrong_request_of_a_session_lets_the_serving_ranks_end(tmp_path: Path) -> None:
    words = ("--pyargs", "shardproof.suites.test_forward", "--engine", "torchrun", "--worlds", "1")
    (status, out, err), other = slurm(tmp_path, 2, *words)
    assert (status, out) == (4, "")
    assert err == "ERROR: worlds=1: must be whole numbers above 1, comma separated; legal: --worlds 2,3\n\n"
    assert other == (0, "", "")


def test_a_failure_says_how_to_launch_it_again() -> None:
    case = Case.parse(TINY)
    command = repeat_command(case, "shardproof.parallel.subject:subject", "--engine torchrun")
    assert command.startswith('torchrun --nproc-per-node 2 -m shardproof run "') and command.endswith(
        "--subject shardproof.parallel.subject:subject --engine torchrun"
    )
    assert repeat_command(case, "shardproof.parallel.subject:subject").startswith('shardproof run "')


def test_a_missing_launcher_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in [name for name in os.environ if name.startswith(LAUNCHERS)]:
        monkeypatch.delenv(name)
    assert cli.main(["run", TINY, "--engine", "torchrun"]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert printed.err.startswith("shardproof run: engine=torchrun: RANK is not set")
    assert "legal: torchrun --nnodes 1 --nproc-per-node 2 -m shardproof run" in printed.err
