"""What the recorder sees of ranks on gloo: times of one clock, not a bit changed; failures, NCCL, hash seeds."""

from __future__ import annotations

import pytest
import torch

from harness.checking.checks import CHECKS
from harness.checking.evidence import FAIL, PASS
from harness.engines.engine import Engine
from harness.engines.processes.forked.pool import PoolEngine
from harness.engines.threads.inproc import InprocEngine
from harness.outcome.merging import merge
from harness.running.proof import prove
from harness.running.ranks.execution import execute, execute_captured
from parallel.subject import subject
from reference.case import Case

TEXT = "mode=tp tp=2 layers=1 dtype=float64 metric=true"


def test_times_of_all_ranks_are_of_one_clock(engine: PoolEngine) -> None:
    """No rank's all_reduce ends before every rank's has begun."""
    events = execute(Case.parse(TEXT), subject, engine, text="").events
    calls = [[e for e in events if e.rank == rank and e.op == "all_reduce" and not e.is_async] for rank in (0, 1)]
    assert calls[0] and len(calls[0]) == len(calls[1])
    for one, other in zip(*calls, strict=True):
        assert one.start_us + one.duration_us >= other.start_us
        assert other.start_us + other.duration_us >= one.start_us


def test_recording_on_gloo_changes_no_bit(engine: PoolEngine) -> None:
    case = Case.parse(TEXT)
    plain, again = (merge(execute(case, subject, engine, text="", record=False).outcomes).tensors for _ in range(2))
    recorded = merge(execute(case, subject, engine, text="").outcomes).tensors
    captured = merge(execute_captured(case, subject, engine).outcomes).tensors
    assert plain
    for other in (again, recorded, captured):
        assert plain.keys() == other.keys() and all(torch.equal(plain[name], other[name]) for name in plain)


def test_a_failure_is_repeated_on_the_pool(engine: PoolEngine) -> None:
    result = prove(Case.parse(TEXT), "tests.harness.toy_subjects:wrong", engine, options="--engine pool")
    assert result.verdict == "fail"
    failed = next(verdict for verdict in result.verdicts if verdict.verdict == "fail")
    assert "--engine pool" in failed.message.splitlines()[-1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: NCCL cannot be tried here")
def test_a_case_is_proved_on_nccl(engine: PoolEngine) -> None:
    text = f"mode=tp tp={min(torch.cuda.device_count(), 2)} layers=1 dtype=float64"
    result = prove(Case.parse(text), "parallel.subject:subject", engine, device="cuda")
    assert result.verdict == "pass", [verdict.message for verdict in result.verdicts if verdict.verdict != "pass"]


def test_a_sum_in_the_order_of_a_set_is_a_replica_conflict_on_processes_and_none_on_threads(engine: PoolEngine) -> None:
    case = Case.parse("mode=tp tp=2 layers=1 hidden=16 heads=2 seq=4 steps=1")
    asked = {name: CHECKS[name] for name in ("replicas", "forward")}

    def verdicts(on: Engine) -> dict[str, str]:
        result = prove(case, "tests.harness.toy_subjects:in_set_order", on, checks=asked)
        return {verdict.check: verdict.verdict for verdict in result.verdicts}

    with InprocEngine() as threads:
        assert verdicts(threads) == {"replicas": PASS, "forward": PASS}, "threads share one hash seed"
    assert verdicts(engine)["replicas"] == FAIL
