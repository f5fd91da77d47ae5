"""Programs of others, unmodified, on two gloo processes: their ledgers are what torch's profiler and nsys saw.

Their output with and without us is compared where it names no time of day.
"""

import os
import re
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from shardproof.harness.traces.nsys_export import export_report, nsys_path
from shardproof.harness.witnesses.session import read_database
from shardproof.harness.witnesses.torch_trace import read_traces
from shardproof.reports.stored.frames import load
from tests.deep import deep
from tests.harness.programs.launched import LIMIT_S, forked, free_port, ran, read_alike, seen_alike

pytestmark = [pytest.mark.peers, pytest.mark.slow]
SCRIPTS = "tests.harness.programs.scripts"
PROGRAMS = {
    "accelerate.test_utils.scripts.test_sync": ("accelerate", {"all_gather", "all_reduce", "broadcast"}),
    f"{SCRIPTS}.deepspeed_zero2": ("deepspeed", {"all_gather", "all_reduce", "broadcast"}),
    f"{SCRIPTS}.fsdp2": ("torch", {"all_gather", "all_reduce", "reduce_scatter"}),
    f"{SCRIPTS}.megatron_1f1b": ("megatron.core", {"all_reduce", "recv", "send"}),
}
SOON = f"{SCRIPTS}.fsdp2"
"""Program of every session: the one that starts soonest."""
LAUNCHERS = {
    "torchrun": ["--nproc-per-node", "2"],
    "accelerate": ["launch", "--multi_gpu", "--num_processes", "2"],
    "deepspeed": ["--num_gpus", "2", "--no_local_rank"],
    "python": ["spawning.py"],
}
"""How each starts two processes, also where there is no GPU."""
SPAWNING = """
import os, runpy, sys
from torch.multiprocessing import spawn

def one(rank, words):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")

if __name__ == "__main__":
    spawn(one, (sys.argv[1:],), 2)
"""
PLAIN = ("accelerate.test_utils.scripts.test_sync", f"{SCRIPTS}.deepspeed_zero2")
"""The programs that are run without us too."""


def own_lines(text: str) -> list[str]:
    """Lines that a program prints, without those that hold times."""
    return [line for line in text.splitlines() if not re.search(r"runtime|per_second|WARNING", line)]


@pytest.mark.parametrize("module", [SOON, *deep("half a CPU minute each", *sorted(PROGRAMS.keys() - {SOON}))])
def test_the_ledger_is_what_the_profiler_saw(tmp_path: Path, module: str) -> None:
    package, ops = PROGRAMS[module]
    if find_spec(package.partition(".")[0]) is None:
        pytest.skip(f"{package} (extra `peers`) is not installed")
    words = ["--profile", "torch", "--steps", "0:1000"]
    ranks = forked(tmp_path, module, record=words, ACCELERATE_USE_CPU="true")
    assert [rank.ended(LIMIT_S) for rank in ranks] == [0, 0], ranks[0].err
    run = load(tmp_path / "runs" / "latest")
    assert run.notes == ()
    assert ops <= set(run.ledger["op"].astype("str"))
    seen_alike(run, "torch", read_traces(run.path / "traces", 2))
    read_alike(run, 2)
    if module in PLAIN:
        plain = forked(tmp_path, module, ACCELERATE_USE_CPU="true")
        assert [rank.ended(LIMIT_S) for rank in plain] == [0, 0], plain[0].err
        assert [own_lines(rank.out) for rank in plain] == [own_lines(rank.out) for rank in ranks]


@pytest.mark.deep("half a CPU minute each")
@pytest.mark.skipif(nsys_path() is None, reason="nsys is not on PATH (.ci/nsys fetches one)")
@pytest.mark.parametrize("module", PROGRAMS)
def test_the_ledger_is_what_nsys_saw(tmp_path: Path, module: str) -> None:
    if find_spec(PROGRAMS[module][0].partition(".")[0]) is None:
        pytest.skip(f"{PROGRAMS[module][0]} (extra `peers`) is not installed")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    record = [sys.executable, "-m", "shardproof", "record", "--profile", "nsys", "--steps", "0:1000", "--"]
    launch = ["torchrun", "--standalone", "--nproc-per-node", "2", "-m", module]
    ended = ran(tmp_path, *record, *launch, PATH=path, ACCELERATE_USE_CPU="true")
    assert ended.returncode == 0, ended.stderr
    run, nsys = load(tmp_path / "runs" / "latest"), nsys_path()
    assert nsys is not None
    (seen,) = read_database(export_report(nsys, run.path / "traces" / "nsys")).values()
    seen_alike(run, "nsys", seen)


@pytest.mark.deep("ten CPU seconds each")
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_launchers_ranks_share_a_folder_each_with_its_part(tmp_path: Path, launcher: str) -> None:
    tool = Path(sys.executable).parent / launcher
    if not tool.exists():
        pytest.skip(f"{launcher} is not installed")
    shutil.copy(Path(__file__).with_name("training.py"), tmp_path)
    (tmp_path / "spawning.py").write_text(SPAWNING)
    words = {"PATH": f"{tool.parent}{os.pathsep}{os.environ['PATH']}", "DS_ACCELERATOR": "cpu"}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()} if launcher == "python" else {}
    command = [sys.executable, "-m", "shardproof", "record", "--", str(tool), *LAUNCHERS[launcher], "training.py", "2"]
    ended = ran(tmp_path, *command, **words, **meeting)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("step 1 loss") == 1
    run = load(tmp_path / "runs" / "latest")
    assert run.notes == ()
    assert set(run.ledger["rank"]) == {0, 1}
    assert run.ledger["step"].max() == 1
