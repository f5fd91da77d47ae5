"""Programs whose ranks are threads of one process: read from torchrun's words, each rank with modules of its own."""

import sys
import sysconfig
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shardproof.harness.errors import ProgramError, RequestError
from shardproof.harness.parity.launching import OUTPUT, LaunchRecorder
from shardproof.harness.programs.session import ValueOptions
from shardproof.harness.programs.threads.launches import ThreadLaunches
from shardproof.harness.programs.threads.own_modules import OwnModules
from shardproof.harness.programs.threads.torchrun_words import read_torchrun

pytest.importorskip("safetensors", reason="needs safetensors")

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
PROGRAM = """
import os, sys, random
import torch, torch.distributed as dist
import ranks_state
word = sys.argv[1]
assert not dist.is_initialized() and sys.modules["__main__"].word == word
if word == "runs":
    dist.device_mesh.init_device_mesh("cpu", (2,))  # makes the world where nothing has
else:
    dist.init_process_group("gloo")
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
assert (rank, size) == (dist.get_rank(), dist.get_world_size()) and not hasattr(ranks_state, "rank")
ranks_state.rank = rank
random_numbers = [None] * size
dist.all_gather_object(random_numbers, random.random())
assert len(set(random_numbers)) == size, "processes draw their own numbers"
assert ranks_state.rank == rank, "another rank has written here"
if word == "raises" and rank == 1:
    raise ValueError("it broke")
if word == "usage":
    print("usage: train.py runs; unrecognized: bad", file=sys.stderr, flush=True)
    sys.exit(2)
if word == "apart" and rank == 1:
    dist.barrier()
if word == "refused":
    print("engine=inproc: it is refused", flush=True)
    os._exit(78)
model = torch.nn.Linear(4, 3)
torch.nn.init.constant_(model.weight, 0.5)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    optimizer.zero_grad()
    model(torch.full((2, 4), 1.0 + rank)).sum().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
print(word, rank, flush=True)
"""


@pytest.fixture(scope="module")
def launches() -> Iterator[ThreadLaunches]:
    started = ThreadLaunches()
    yield started
    started.close()


def recorder(folder: Path, launches: ThreadLaunches) -> LaunchRecorder:
    (folder / "train.py").write_text(PROGRAM, encoding="utf-8")
    (folder / "ranks_state.py").write_text("", encoding="utf-8")
    values = ValueOptions(dtype="float64")
    return LaunchRecorder(folder=folder / "runs", steps=2, timeout_s=120.0, values=values, threads=launches)


def test_every_thread_is_a_rank_as_its_program_knows_it(tmp_path: Path, launches: ThreadLaunches) -> None:
    script = str(tmp_path / "train.py")
    record = recorder(tmp_path, launches).record
    launch = record("first", [*TORCHRUN, "--nproc-per-node", "2", script, "runs"])
    assert [rank.rank for rank in launch.ranks] == [0, 1] and launch.world_size == 2 and launch.steps == 2
    given = [rank.tensor(row) for rank, row in launch.rows("sample")]
    assert [one.flatten().tolist() for one in given] == [[1.0] * 8, [2.0] * 8] and given[0].dtype == torch.float64
    grads = [rank.tensor(row) for rank, row in launch.rows("grad") if row.name == "weight"]
    assert torch.equal(grads[0], grads[1]) and grads[0].unique().tolist() == [6.0]
    with pytest.raises(ProgramError, match=r"ValueError: it broke[\s\S]*legal: no --engine inproc") as raised:
        record("second", [*TORCHRUN, "--nproc-per-node", "2", script, "raises"])
    assert "launch B (" in str(raised.value)
    usage = r"exit status 2 before its first step; its last lines:\n  usage: .*bad"
    with pytest.raises(RequestError, match=usage) as refused:
        record("third", [*TORCHRUN, "--nproc-per-node", "2", script, "usage"])
    assert "legal" not in str(refused.value)
    with pytest.raises(ProgramError, match=r"ranks disagree in call #2 of world \(0 1\): the op is barrier on rank 1"):
        record("again", [*TORCHRUN, "--nproc-per-node", "2", script, "apart"])
    with pytest.raises(RequestError, match="engine=inproc: it is refused$"):
        record("perturbed-1", [*TORCHRUN, "--nproc-per-node", "1", script, "refused"])
    assert "runs 1" in (launch.folder / OUTPUT).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "command, ranks, program",
    [
        ("torchrun --nproc-per-node 4 train.py --tp 2", 4, ("train.py", "--tp", "2")),
        ("torchrun --standalone --nproc_per_node=2 -m package.train", 2, ("-m", "package.train")),
        ("/usr/bin/python3 -m torch.distributed.run --nproc-per-node 1 train.py", 1, ("train.py",)),
        ("python train.py --nproc-per-node 4", 0, ()),
    ],
)
def test_what_torchrun_would_start(command: str, ranks: int, program: tuple[str, ...]) -> None:
    found = read_torchrun(command.split())
    assert (ranks, program) == (0, ()) if found is None else (found.ranks, found.program) == (ranks, program)


@pytest.mark.parametrize(
    "command, told",
    [
        ("srun -n 4 python train.py", "ranks that srun starts are no threads"),
        ("accelerate launch train.py", "ranks that accelerate starts are no threads"),
        ("torchrun --nnodes 2 train.py", "nnodes=2: threads are ranks of one machine"),
        ("torchrun --no-python train.sh", "threads run no other program"),
        ("torchrun --nproc-per-node gpu train.py", "nproc-per-node=gpu: must be a number"),
        ("torchrun --nproc-per-node 2", "torchrun would not start: "),
    ],
)
def test_what_threads_cannot_stand_for_is_one_sentence(command: str, told: str) -> None:
    with pytest.raises(RequestError, match=rf"^engine=inproc: .*{told}.*; legal: torchrun") as raised:
        read_torchrun(command.split())
    assert "\n" not in str(raised.value)


def test_an_installed_package_that_asks_for_its_rank_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / name))
    modules = OwnModules()
    texts = {"purelib/plain/a.py": "import torch", "purelib/asks/state.py": "import torch\nrank = get_rank()"}
    for place, text in (*texts.items(), ("own/model.py", "import torch\nrank = get_rank()")):
        file = tmp_path / place
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        assert modules.find_shared_state() is None
        name = ".".join(file.relative_to(tmp_path).with_suffix("").parts[-2:])
        module = types.ModuleType(name)
        module.__file__ = str(file)
        monkeypatch.setitem(sys.modules, name, module)
        if "asks" in place:
            break
    assert "the package asks asks for its rank (in asks.state)" in str(modules.find_shared_state())
    assert set(modules.read()) == {"__main__"}
