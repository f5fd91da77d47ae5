"""On a GPU: ranks of this process share one, ranks of their own take one each; `pytest -m gpu` is the one command.

Times are of CUDA events. The ranks' mathematics is that of the CPU, so float64 has the same limits.
"""

from pathlib import Path

import pytest
import torch

from shardproof.harness.dense_model import parse_cases
from shardproof.harness.engines.engine import Engine
from shardproof.harness.engines.interposer import Interposer
from shardproof.harness.engines.processes.forked.pool import PoolEngine
from shardproof.harness.engines.threads.inproc import InprocEngine
from shardproof.harness.recording.recorder import Recorder
from shardproof.harness.recording.spans import stopwatch
from shardproof.harness.running.proof import prove
from shardproof.harness.running.request import Request
from shardproof.harness.running.result import CaseResult
from shardproof.harness.running.run import run_request
from shardproof.harness.running.witnessing import witnesses
from shardproof.harness.subject import resolve_subject
from shardproof.reference.case import Case
from tests.harness.processes.test_torchrun import TINY, torchrun
from tests.harness.recording.toy_calls import a_call

GPUS = torch.cuda.device_count()
NAME = "shardproof.parallel.subject:subject"
FOUR = "kv_heads=4 layers=1 dtype=float64"
MODES = {mode: f"mode={mode} tp=4 {FOUR} seq=24" for mode in ("tp", "tp-sp")}
MODES |= {mode: f"preset=tiny-internlm2 mode={mode} tp=4 {FOUR}" for mode in ("mtp", "msp", "fsp")}
MODES |= {"autotp": f"mode=autotp family=opt tp=4 {FOUR}"}
MODES |= {"isp": f"preset=tiny-internlm2 mode=isp tp=2 dp=2 wp=4 {FOUR}"}

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS == 0, reason="no CUDA device: nothing can be tried on one here")]
SEVERAL = pytest.mark.skipif(GPUS < 2, reason=f"{GPUS} CUDA devices: NCCL needs one a rank, so two")


def passed(text: str, engine: Engine) -> CaseResult:
    result = prove(Case.parse(text), NAME, engine, device="cuda")
    assert result.verdict == "pass", [verdict.message for verdict in result.verdicts if verdict.verdict != "pass"]
    return result


@pytest.mark.parametrize("text", MODES.values(), ids=MODES)
def test_four_ranks_share_one_gpu(engine: InprocEngine, text: str) -> None:
    assert any(event.duration_us > 0 for event in passed(text, engine).events)


def test_sums_in_any_order_are_ordered_while_ranks_run(engine: InprocEngine) -> None:
    """Of four rows a token, which index_add adds up on a GPU in whatever order they come."""
    sizes = "heads=4 kv_heads=4 hidden=32 ffn=24 expert_ffn=24 seq=64 batch=4 micro=1"
    passed(f"mode=tp tp=2 experts=8 top_k=4 {sizes}", engine)
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_calls_duration_is_the_streams_and_not_that_of_the_enqueue() -> None:
    call = a_call(group=(0,), shapes=((1,),), payload_bytes=4, device="cuda")
    with Recorder("", "tp", 1, {}, stopwatch=stopwatch("cuda")) as recorder, recorder.on_rank(0):
        for sleeps in (0, 1):
            ticket = recorder.on_issue(0, call)
            if sleeps:
                torch.cuda._sleep(100_000_000)  # cycles: above 30 ms at any clock
            recorder.on_completion(0, ticket)
    quick, slow = recorder.events()
    assert slow.duration_us > 30_000 > quick.duration_us
    assert slow.start_us < 1_000_000


def test_a_captured_call_is_counted_once_a_replay() -> None:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1)
    try:
        x, graph = torch.ones(4, device="cuda"), torch.cuda.CUDAGraph()
        torch.distributed.all_reduce(x)  # warms NCCL up: a communicator cannot be made in a capture
        torch.cuda.synchronize()
        with Recorder("", "tp", 1, {}) as recorder, recorder.on_rank(0), Interposer(recorder):
            with torch.cuda.graph(graph):
                torch.distributed.all_reduce(x)
                x += 1  # NCCL launches nothing for one rank, and an empty graph is warned of
            for _ in range(3):
                graph.replay()
        assert [(event.op, event.graph) for event in recorder.events()] == [("all_reduce", "graph0")] * 3
        assert x.tolist() == [4.0] * 4
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_gpt3_at_its_real_widths_in_float16(tmp_path: Path) -> None:
    """Two of its layers: of all of them the dense model keeps more in float64 than 139 GiB hold."""
    words = "mode=tp tp=4 dtype=float16 master=float32 scaler=dynamic layers=2 steps=2 lr=6e-5 clip=1.0"
    request = Request(
        cases=parse_cases((f"preset=gpt3-857m {words}",)), subject=resolve_subject(NAME), device="cuda", out=tmp_path
    )
    assert [verdict.message for verdict in run_request(request).verdicts if verdict.verdict != "pass"] == []


@SEVERAL
@pytest.mark.parametrize("text", ["mode=tp tp=2 layers=1 dtype=float64", "preset=tiny-internlm2 mode=isp tp=2 wp=2"])
def test_a_case_is_proved_on_nccl(text: str) -> None:
    with PoolEngine() as pool:
        events = passed(text, pool).events
    assert all(event.duration_us > 0 for event in events if event.op not in {"send", "recv", "barrier"})


@SEVERAL
@pytest.mark.parametrize("tool", ["torch", "nsys"])
def test_every_witness_sees_what_the_recorder_saw_on_nccl(tool: str, tmp_path: Path) -> None:
    case = Case.parse("mode=tp-sp tp=2 layers=1 dtype=float64")
    told = witnesses([case], NAME, (tool,), tmp_path, device="cuda", timeout_s=120.0)
    if tool not in told.sessions:
        pytest.skip("; ".join(told.notes))
    with PoolEngine() as pool:
        result = prove(case, NAME, pool, device="cuda")
    assert result.evidence is not None
    said = told.judge_case(case, result.events, None)
    assert said.verdict.verdict == "pass", said.verdict.message


@SEVERAL
def test_torchrun_proves_a_case_on_nccl(tmp_path: Path) -> None:
    command = ("-m", "shardproof", "run", TINY, "--engine", "torchrun", "--device", "cuda", "--out", "there")
    status, out, err = torchrun(tmp_path, 2, *command)
    assert status == 0, err
    assert "pass" in out
