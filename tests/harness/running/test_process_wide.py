"""Effects of a proof on its process: a time limit, prints shown once, no compiler, `per_rank` modules as before."""

import logging
import os
import re
import signal
import sys
import time
import tracemalloc
import warnings
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from shardproof.harness.engines.processes.workers import reopen_output
from shardproof.harness.engines.threads.inproc import InprocEngine
from shardproof.harness.errors import TimeLimit
from shardproof.harness.running.proof import prove
from shardproof.harness.running.ranks.execution import RankTask, perform
from shardproof.harness.running.ranks.output import rank_output, shown_once
from shardproof.harness.running.trials.trial import in_time
from shardproof.harness.torch_internals.dispatch import deterministic_on
from shardproof.reference.case import Case
from shardproof.suites.subjects import mlp
from tests.forked import started
from tests.harness.command_line import ONE
from tests.harness.proofs import ran
from tests.harness.toy_subjects import Changed, LoopEngine, Stating


def endless() -> None:
    while True:
        time.sleep(0.01)


def test_what_takes_longer_than_its_limit_ends_with_the_line_where_it_stood() -> None:
    """A body that catches the interruption is interrupted again."""
    begin_s, caught = time.monotonic(), 0
    told = r"time limit of 0\.1 s: the model is at work at \S*test_process_wide\.py:\d+ in endless"
    with pytest.raises(TimeLimit, match=told), in_time(0.1, "the model"):
        try:
            endless()
        except Exception:
            caught += 1
            endless()
    assert caught == 1 and time.monotonic() - begin_s < 10
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_a_program_with_an_alarm_of_its_own_keeps_it() -> None:
    heard: list[int] = []
    signal.signal(signal.SIGALRM, lambda number, _: heard.append(number))
    try:
        with in_time(0.01, "the model"):
            time.sleep(0.7)
        assert not heard and signal.getsignal(signal.SIGALRM) is not signal.SIG_DFL
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


def test_a_truth_that_never_ends_is_unknown_in_the_time_of_a_run() -> None:
    subject = Stating(truth=lambda case, device: endless())
    result = prove(Case.parse(ONE), subject, LoopEngine(), timeout_s=0.2)
    assert result.verdict == "unknown" and result.machine.startswith("time limit of 0.2 s: the dense model is at work")


LOG = logging.getLogger(__name__)


def printed(case: object, outcome: object) -> dict[str, Tensor]:
    """Prints in all ways; one line is each rank's own."""
    print("hello")
    print("hello")
    print("rank", dist.get_rank())
    print("stray", file=sys.stderr)
    LOG.warning("logged")
    print("no end", end="")
    return {}


subject = Changed(mlp.subject, printed, cases=("tp=2",))


def test_what_every_rank_prints_in_every_run_is_shown_once_with_how_often(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    handler = logging.StreamHandler(sys.stderr)  # made before the run, as libraries do
    LOG.addHandler(handler)
    try:
        result = ran(tmp_path, f"{__name__}:subject", "tp=2")
    finally:
        LOG.removeHandler(handler)
    out, err = capsys.readouterr()
    assert result.exit_status == 0
    assert handler.stream is sys.stderr
    lines = [line for line in out.splitlines() if "rank" not in line]
    assert lines == ["hello", "hello", "no end"]  # of what a rank itself repeats, nothing is lost
    assert {"rank 0", "rank 1"} <= set(out.splitlines())
    assert err.splitlines().count("stray") == 1 and err.splitlines().count("logged") == 1
    told = re.search(r"\(\d+ lines that the ranks printed (\d+) to (\d+) times are shown once\)", err)
    assert told is not None and 2 <= int(told[1]) <= int(told[2])  # two ranks, several runs


def test_in_a_forked_process_too_lines_of_a_log_are_shown_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "err").open("w") as inherited, (tmp_path / "out").open("w") as printed:
        monkeypatch.setattr(sys, "stdout", printed)
        monkeypatch.setattr(sys, "stderr", inherited)
        handler = logging.StreamHandler()
        LOG.addHandler(handler)
        try:
            reopen_output()  # as a forked process begins
            with shown_once():
                for _rank in range(2):
                    with rank_output():
                        LOG.warning("logged")
        finally:
            LOG.removeHandler(handler)
            for stream in (sys.stdout, sys.stderr):
                stream.close()
    assert handler.stream is not inherited
    assert (tmp_path / "err").read_text().splitlines().count("logged") == 1


def test_a_handler_that_looks_for_standard_error_at_each_line_is_left_as_it_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert logging.lastResort is not None
    LOG.addHandler(logging.lastResort)  # its stream cannot be set
    try:
        with shown_once():
            for _rank in range(2):
                with rank_output():
                    LOG.warning("logged")
    finally:
        LOG.removeHandler(logging.lastResort)
    assert capsys.readouterr().err.splitlines().count("logged") == 1


def test_what_torch_logs_on_every_rank_is_shown_once_whatever_rank_time_and_process_it_names(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def logged(rank: int, level: str = "W", message: str = "no graph") -> str:
        return f"[rank{rank}]:{level}112{rank} 12:00:0{rank}.12300{rank} {rank}77 torch/_dynamo/x.py:12] {message}"

    with shown_once():
        for rank in range(3):
            with rank_output():
                print(logged(rank), file=sys.stderr)
                print(logged(rank).partition(":")[2], file=sys.stderr)  # as torch logs it without a world
                print(logged(rank, "E"), logged(rank, message=f"rank {rank}"), sep="\n", file=sys.stderr)
    lines = capsys.readouterr().err.splitlines()
    own = [logged(rank, message=f"rank {rank}") for rank in range(3)]
    assert lines[:-1] == [logged(0), logged(0).partition(":")[2], logged(0, "E"), *own]


class Thrown:
    """A stream that keeps nothing but the numbers of its lines and its last ones."""

    def __init__(self) -> None:
        self.count, self.end = 0, ""

    def write(self, text: str) -> int:
        self.count, self.end = self.count + text.count("\n"), (self.end + text)[-10_000:]
        return len(text)

    def flush(self) -> None:
        """Nothing waits."""


def test_memory_does_not_grow_with_what_ranks_print() -> None:
    """The first 10,000 lines are shown, and the last; those between are counted, text without an end is shown.

    Two ranks print 15,000 lines and the end of one without a line feed.
    """
    out, err, peaks = Thrown(), Thrown(), list[int]()
    with redirect_stdout(out), redirect_stderr(err), shown_once():
        tracemalloc.start()
        for rank in range(2):
            with rank_output():
                for number in range(15_000):
                    print(rank, "prints a line of its own:", number)
                for _ in range(3_000):
                    print(".", end="")
                peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert max(peaks) < 8e6 and peaks[1] < peaks[0] * 1.1
    assert 10_000 <= out.count < 10_200
    assert (
        "(the ranks printed 20,002 more lines in all runs of the case; the last 100 different ones follow)" in err.end
    )
    assert "\n1 prints a line of its own: 14999\n" in out.end


def test_others_than_ranks_and_lines_that_are_flushed_pass(capsys: pytest.CaptureFixture[str]) -> None:
    with shown_once():
        for _rank in range(2):
            print("truth")
            with rank_output():
                print("progress", end="\r", flush=True)
    out, err = capsys.readouterr()
    assert out == "truth\nprogress\r" * 2
    assert err == ""


def stepped(kind: Any) -> Tensor:
    weight = torch.linspace(-1, 1, 7, dtype=torch.float64, requires_grad=True)
    optimizer = kind([weight], lr=0.1, weight_decay=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        (weight**3).sum().backward()
        optimizer.step()
    assert torch.is_grad_enabled()
    return weight.detach()


def recomputed() -> Tensor:
    weight = torch.linspace(-1, 1, 7, dtype=torch.float64, requires_grad=True)
    checkpoint(torch.sin, checkpoint(torch.exp, weight, use_reentrant=False), use_reentrant=False).sum().backward()
    assert weight.grad is not None
    return weight.grad


def without_the_compiler_and_with_it() -> int:
    torch_: Any = torch
    with InprocEngine() as engine:
        case = Case.parse("mode=tp tp=2 layers=1 hidden=16 heads=2 ffn=16 seq=8 optimizer=adamw recompute=full")
        assert prove(case, "shardproof.parallel.subject:subject", engine).verdict == "pass"
    kinds = torch.optim.SGD, torch.optim.AdamW
    before, gradient = [stepped(kind) for kind in kinds], recomputed()
    assert "torch._dynamo" not in sys.modules
    assert torch_._dynamo.config.error_on_nested_fx_trace is not None  # asked by anyone else, it is loaded
    assert torch_._dynamo is sys.modules["torch._dynamo"]
    assert torch.equal(gradient, recomputed())
    assert all(torch.equal(one, stepped(kind)) for one, kind in zip(before, kinds, strict=True))
    wrappers: tuple[Any, ...] = torch.optim.Optimizer.zero_grad, checkpoint
    for wrapper in wrappers:
        assert wrapper.__wrapped__.__dynamo_disable.__module__.startswith("torch.")
    return 0


def test_optimizers_and_checkpoints_run_without_the_compiler_and_with_it_alike(tmp_path: Path) -> None:
    process = started(without_the_compiler_and_with_it, folder=tmp_path)
    assert process.ended(120) == 0, process.err


GROUPS: list[str] = []
"""State that a library keeps for a process."""


class Library:
    """Its first call fills what the process has, and it refuses to do that twice, as Megatron does."""

    def __call__(self, case: Case, device: torch.device) -> dict[str, Tensor]:
        if GROUPS:
            raise RuntimeError("already initialized")
        GROUPS.append("tp")
        return {"loss/0": torch.ones(())}


def test_a_process_runs_case_after_case() -> None:
    forgetful, careful = Library(), Library()
    careful.per_rank = (__name__,)  # type: ignore[attr-defined]
    task = RankTask(case=Case.parse("mode=tp tp=2"), subject=careful, device="cpu")
    for _ in range(2):
        assert "loss/0" in perform(0, task).outcomes[0]
        assert not GROUPS
    perform(0, RankTask(case=task.case, subject=forgetful, device="cpu"))
    assert GROUPS == ["tp"], "what is not named stays"
    GROUPS.clear()


def test_a_gpu_adds_up_in_a_fixed_order_and_the_switch_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU itself it is tried in `test_gpu`; a CPU is left alone."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with deterministic_on(torch.device("cpu")):
        assert not torch.are_deterministic_algorithms_enabled()
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    try:
        torch.use_deterministic_algorithms(True)
        with deterministic_on(torch.device("cuda")):
            pass
        assert torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(False)
        with deterministic_on(torch.device("cuda")):
            assert torch.are_deterministic_algorithms_enabled() and os.environ["CUBLAS_WORKSPACE_CONFIG"]
            warnings.warn("cumsum does not have a deterministic implementation", UserWarning, stacklevel=1)
        assert not torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
