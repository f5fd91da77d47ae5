"""On gloo the recorder sees what it sees in this process: equal ledgers, equal outcomes, not a bit changed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from harness.checking.checks import CHECKS
from harness.checking.evidence import FAIL, PASS
from harness.engines.engine import Engine
from harness.engines.processes.forked.pool import PoolEngine
from harness.engines.threads.inproc import InprocEngine
from harness.ledger import Event
from harness.outcome.merging import merge
from harness.running.proof import prove
from harness.running.ranks.execution import execute, execute_captured
from parallel.subject import subject
from reference.case import Case

TEXTS = (
    "mode=tp tp=2 layers=1 dtype=float64 metric=true",
    "mode=tp-sp tp=2 dp=2 layers=1 kv_heads=4 dtype=float64 recompute=full steps=2",
    "preset=tiny-internlm2 mode=isp tp=2 wp=2 layers=2 dtype=float64",
)


@pytest.fixture
def engine(pool: PoolEngine) -> PoolEngine:
    return pool


def known(event: Event) -> Event:
    """The event without times; its caller is a line of the same code."""
    return replace(event, start_us=0.0, duration_us=0.0)


@pytest.mark.parametrize("text", TEXTS)
def test_ledgers_and_outcomes_are_those_of_the_in_process_engine(engine: PoolEngine, text: str) -> None:
    case = Case.parse(text)
    with InprocEngine() as inproc:
        here = execute(case, subject, inproc, text=text)
    there = execute(case, subject, engine, text=text)
    assert here.events and [known(event) for event in there.events] == [known(event) for event in here.events]
    true, found = merge(here.outcomes), merge(there.outcomes)
    assert not found.flaws and found.tensors.keys() == true.tensors.keys()
    for name, tensor in found.tensors.items():
        torch.testing.assert_close(tensor, true.tensors[name], rtol=1e-12, atol=1e-12)  # gloo adds in another order


def test_times_of_all_ranks_are_of_one_clock(engine: PoolEngine) -> None:
    """No rank's all_reduce ends before every rank's has begun."""
    events = execute(Case.parse(TEXTS[0]), subject, engine, text="").events
    calls = [[e for e in events if e.rank == rank and e.op == "all_reduce" and not e.is_async] for rank in (0, 1)]
    assert calls[0] and len(calls[0]) == len(calls[1])
    for one, other in zip(*calls, strict=True):
        assert one.start_us + one.duration_us >= other.start_us
        assert other.start_us + other.duration_us >= one.start_us


def test_recording_on_gloo_changes_no_bit(engine: PoolEngine) -> None:
    case = Case.parse(TEXTS[0])
    plain, again = (merge(execute(case, subject, engine, text="", record=False).outcomes).tensors for _ in range(2))
    recorded = merge(execute(case, subject, engine, text="").outcomes).tensors
    captured = merge(execute_captured(case, subject, engine).outcomes).tensors
    assert plain
    for other in (again, recorded, captured):
        assert plain.keys() == other.keys() and all(torch.equal(plain[name], other[name]) for name in plain)


def test_a_case_is_proved_on_real_processes(engine: PoolEngine) -> None:
    result = prove(Case.parse(TEXTS[0]), "parallel.subject:subject", engine)
    assert result.verdict == "pass", [verdict.message for verdict in result.verdicts if verdict.verdict != "pass"]
    assert result.evidence is not None and result.evidence.captured


def test_a_failure_is_repeated_on_the_pool(engine: PoolEngine) -> None:
    result = prove(Case.parse(TEXTS[0]), "tests.harness.toy_subjects:wrong", engine, options="--engine pool")
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
