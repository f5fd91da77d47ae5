"""A recorded program starts as Python would start it, ranks share a folder; execution traces tell of results."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.programs.execution_trace import TracedOperator, Used, flops, nodes_of, used
from torch.distributed import distributed_c10d

from harness.errors import MachineError, RequestError
from harness.programs.arming import arm
from harness.programs.session import VARIABLE, Options, ProgramSession, shared_session, silence_of, steps_of, tools_of
from reports.stored.frames import load
from tests.forked import started
from tests.harness.programs.launched import environment

OPTIONS: Options = {"steps": None, "profile": (), "silence_s": 60.0, "stated": {}}
TELLS = """
import json, os, sys
print(json.dumps([sys.argv, __name__, __file__, __package__, sys.path[0], sys.flags.utf8_mode, __spec__ is None,
                  [path for path in sys.path if "hook" in path]]))
print("on stderr", file=sys.stderr)
if "raise" in sys.argv:
    raise ValueError("the program's own")
sys.exit(7)
"""


def ran(folder: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words, cwd=folder, env=environment(folder, **more), capture_output=True, text=True, timeout=60, check=False
    )


def record(*words: str) -> list[str]:
    return [sys.executable, "-X", "utf8", "-m", "shardproof.record", *words]


def announced(folder: Path) -> str:
    """The line in which a recording begins."""
    return f"shardproof: recording into runs/{os.readlink(folder / 'runs' / 'latest')}\n"


@pytest.mark.parametrize("program", [["own.py"], ["-m", "own"]])
@pytest.mark.parametrize("words", [["--x", "a b", ""], ["raise"]])
def test_arguments_main_exit_code_and_output_are_those_of_python(
    tmp_path: Path, program: list[str], words: list[str]
) -> None:
    (tmp_path / "own.py").write_text(TELLS)
    plain = ran(tmp_path, sys.executable, "-X", "utf8", *program, *words)
    recorded = ran(tmp_path, *record(*program, *words))
    assert recorded.returncode == plain.returncode == (1 if "raise" in words else 7)
    assert recorded.stdout == plain.stdout
    assert recorded.stderr == announced(tmp_path) + plain.stderr


def test_a_whole_command_and_the_programs_own_sitecustomize(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("import sys; print(sys.modules['sitecustomize'].__file__, sys.argv)")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("print('own sitecustomize')")
    path = {"PYTHONPATH": f"{tmp_path / 'site'}{os.pathsep}{environment(tmp_path)['PYTHONPATH']}"}
    command = ["sh", "-c", f"{sys.executable} own.py 'a b'"]
    plain = ran(tmp_path, *command, **path)
    recorded = ran(tmp_path, sys.executable, "-m", "shardproof", "record", "--", *command, **path)
    assert "own sitecustomize" in plain.stdout
    once_more = "own sitecustomize\n"  # in the process of `shardproof record` itself
    assert (recorded.returncode, recorded.stdout) == (plain.returncode, once_more + plain.stdout)
    assert recorded.stderr == announced(tmp_path)


def test_nsys_wraps_the_whole_command(tmp_path: Path) -> None:
    tool = tmp_path / "nsys"
    tool.write_text('#!/bin/sh\necho "$@"\n')
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    path = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    ended = ran(tmp_path, *[sys.executable, "-m", "shardproof"], "record", "--profile", "nsys", "--", "sh", "x", **path)
    assert ended.returncode == 0
    assert ended.stdout.startswith("profile --trace=")
    assert ended.stdout.endswith(f"/{os.readlink(tmp_path / 'runs' / 'latest')}/traces/nsys sh x\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps", "3:2", "x.py"], "steps=3:2: holds no step, for END is not included; legal: --steps 10:20"),
        (["--steps", "3", "x.py"], "steps=3: must be FIRST:END"),
        (["--profile", "torch", "x.py"], "profile=torch: torch's profiler keeps"),
        (["--profile", "nsys", "x.py"], "legal: shardproof record --profile nsys -- torchrun"),
        (["--profile", "perf", "x.py"], "profile=perf: is not a profiler; legal: torch,nsys"),
        (["--tokens", "0", "x.py"], "tokens=0: must be the tokens of all ranks in one step"),
        (["--case", "mode=none", "x.py"], "case 'mode=none': "),
        (["--cluster", "no-such", "x.py"], "cluster=no-such"),
        (["--silence", "0", "x.py"], "silence=0: must be seconds, at least 1; legal: --silence 60"),
        ([], "program: is missing; legal: python -m shardproof.record train.py"),
    ],
)
def test_wrong_words_are_one_line(tmp_path: Path, words: Sequence[str], message: str) -> None:
    ended = ran(tmp_path, *record(*words))
    assert ended.returncode == 2
    assert message in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    assert not (tmp_path / "runs").exists()


def test_a_command_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    ended = ran(tmp_path, sys.executable, "-m", "shardproof", "record", "--", "no-such-command")
    assert (ended.returncode, (tmp_path / "runs").exists()) == (2, False)
    assert ended.stderr.startswith("shardproof record: command=no-such-command: is not on PATH; legal: torchrun")


def test_ranks_of_a_launch_share_a_folder_and_later_launches_have_their_own(tmp_path: Path) -> None:
    out = str(tmp_path)
    launch = {"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "a", "MASTER_PORT": "1", "TORCHELASTIC_RESTART_COUNT": "0"}
    first, made = shared_session(out, "train", ["train.py"], launch, OPTIONS)
    second, again = shared_session(out, "train", ["train.py"], {**launch, "RANK": "1"}, OPTIONS)
    assert (made, again) == (True, False)
    assert first == second == ProgramSession.of(first.text)
    others = [
        shared_session(out, "train", ["train.py"], words, OPTIONS)[0].folder
        for words in ({**launch, "MASTER_PORT": "2"}, {**launch, "TORCHELASTIC_RESTART_COUNT": "1"}, {}, {})
    ]
    assert len({first.folder, *others}) == 5
    tickets = [path for path in (tmp_path / ".sessions").iterdir() if not path.suffix]
    ticket = next(path for path in tickets if path.read_text() == first.text)
    os.utime(ticket, (1.0, 1.0))  # a launch of long ago with the same port and name
    assert shared_session(out, "train", ["train.py"], launch, OPTIONS)[1]


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match="out=.*: the run folder cannot be written"):
        shared_session(str(tmp_path / "file"), "train", [], {}, OPTIONS)


def one_forked_rank(folder: str) -> int:
    """A program that its launcher forks: it ends without the functions of atexit."""
    session, _made = shared_session(folder, "forked", ["forked.py"], {}, OPTIONS)
    os.environ[VARIABLE] = session.text
    arm(distributed_c10d)
    distributed_c10d.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    distributed_c10d.all_reduce(torch.ones(3))
    return 0


def test_a_forked_rank_comes_to_an_orderly_end(tmp_path: Path) -> None:
    assert started(one_forked_rank, str(tmp_path), folder=tmp_path).ended() == 0
    run = load(tmp_path / "latest")
    assert run.notes == ()
    assert len(run.ledger) == 1
    assert (tmp_path / "latest" / "ranks" / "0" / "last.json").is_file()


def test_a_program_that_does_not_communicate_leaves_nothing_and_that_is_said(tmp_path: Path) -> None:
    shared_session(str(tmp_path), "train", ["train.py"], {}, OPTIONS)
    with pytest.raises(RequestError, match="nothing was recorded: no process of the program has initialised"):
        load(tmp_path / "latest")


def test_options_are_read() -> None:
    assert (steps_of(None), steps_of("10:20"), silence_of("1.5")) == (None, (10, 20), 1.5)
    assert tools_of("torch,nsys,torch", (1, 2)) == ("torch", "nsys")
    session = ProgramSession(folder="f", steps=(2, 4), profile=(), silence_s=1, origin_s=0, boot="b", command=("x",))
    assert [step for step in range(6) if session.covers(step)] == [2, 3]
    assert json.loads(session.text)["steps"] == [2, 4]


LOOPS, ROWS, WIDTH = 2, 3, 5


def planted_rank(folder: str) -> int:
    """Of each loop's six calls the first result and the first gather are never read, and the second gather repeats."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    observer = torch.profiler.ExecutionTraceObserver().register_callback(f"{folder}/rank0.et.json")
    observer.start()
    weight = torch.ones(WIDTH, 7)
    for _ in range(LOOPS):
        lost = torch.ones(11)
        dist.all_reduce(lost)
        kept = torch.ones(ROWS, WIDTH)
        dist.all_reduce(kept)
        product = kept @ weight
        gathered = [torch.empty(ROWS, 7)]
        dist.all_gather(gathered, product)
        dist.all_gather(gathered, product)
        counted = torch.ones(2)
        dist.all_reduce(counted[1:])
        counted.tolist()
        product.add_(1)
        dist.all_gather(gathered, product)
        gathered[0].sum().item()
    observer.stop()
    observer.unregister_callback()
    dist.destroy_process_group()
    return 0


def test_unread_results_and_repeated_gathers_are_found_and_flops_counted(tmp_path: Path) -> None:
    assert started(planted_rank, str(tmp_path), folder=tmp_path).ended() == 0
    nodes = nodes_of(tmp_path / "rank0.et.json")
    reduced = [("all_reduce", True, False), ("all_reduce", False, False)]
    gathered = [("all_gather", True, False), ("all_gather", True, True)]
    loop = [*reduced, *gathered, ("all_reduce", False, False), ("all_gather", False, False)]
    first = [Used(op=op, unread=unread, repeated=repeated) for op, unread, repeated in loop]
    assert used(nodes, settled=len(loop))[: len(loop)] == first
    assert [one.op for one in used(nodes)] == [op for op, _, _ in loop] * LOOPS
    assert [one.repeated for one in used(nodes)[len(loop) :]] == [repeated for _, _, repeated in loop]
    assert not used(nodes)[len(loop)].unread  # nothing has happened to its memory, and the trace ends
    assert flops(nodes) == LOOPS * 2 * ROWS * WIDTH * 7


def operator(number: int, name: str, schema: str, *inputs: object) -> TracedOperator:
    """A leaf of the trace."""
    words: dict[str, Any] = {"shapes": (), "types": (), "outputs": (), "out_shape": None}
    return TracedOperator(number=number, parent=0, thread=1, name=name, schema=schema, inputs=inputs, **words)


@pytest.mark.parametrize(("parts_read", "unread"), [((), True), ((1,), False), ((0, 1), False)])
def test_a_result_of_which_a_part_is_read_is_read(parts_read: tuple[int, ...], unread: bool) -> None:
    """A gather gives one tensor a rank; a rank that reads those of others alone has read it."""
    parts = [[place, place + 10, 0, 6, 4, "cpu"] for place in range(2)]  # tensor, storage, offset, elements, bytes
    nodes = [
        operator(
            1, "c10d::allgather_", "(Tensor[][] outputs, Tensor[] inputs) -> ()", [parts], [[9, 9, 0, 6, 4, "cpu"]]
        )
    ]
    nodes += [operator(2, "aten::sum", "aten::sum(Tensor self) -> (Tensor)", parts[place]) for place in parts_read]
    nodes += [operator(3, "aten::zero_", "aten::zero_(Tensor(a!) self) -> (Tensor(a!))", part) for part in parts]
    assert [one.unread for one in used(nodes)] == [unread]


def test_what_is_no_execution_trace_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "rank0.et.json").write_text("[1]")
    with pytest.raises(MachineError, match="execution trace: .*rank0.et.json cannot be read"):
        nodes_of(tmp_path / "rank0.et.json")
