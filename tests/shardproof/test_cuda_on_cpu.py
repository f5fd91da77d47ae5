"""cuda_on_cpu: a program written for CUDA computes on the CPU what it computes there when it is written for the CPU."""

import importlib
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardproof
from shardproof.harness.engines.threads.inproc import InprocEngine
from shardproof.harness.running.ranks.execution import execute
from shardproof.reference.case import Case
from tests.forked import started


def _names() -> list[dict[str, Any]]:
    """All that it may change; torch imports modules of its own when they are needed."""
    owners: tuple[Any, ...] = (torch, Tensor, nn.Module, torch.cuda, torch.cuda.random, torch.cuda.nvtx)
    return [{name: x for name, x in vars(owner).items() if not isinstance(x, ModuleType)} for owner in owners]


def _trained(device: Any) -> tuple[Tensor, ...]:
    """A model, data and an optimizer on the device; moved in every way."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5, device=device), nn.Dropout(0.5), nn.Linear(5, 2)).to(device)
    x = torch.randn(4, 3, device=device).to(device, torch.float32).to(device=device)
    loss = (model(x) + x.new_ones(2, device=device) + torch.ones_like(x[:, :2], device=device)).square().sum()
    loss.backward()
    torch.optim.Adam(model.parameters(), foreach=False).step()
    return (loss.detach(), *(p.detach() for p in model.parameters()))


def test_a_step_on_cuda_is_the_step_on_the_cpu_in_every_bit() -> None:
    expected = _trained("cpu")  # torch imports its compiler for the optimizer, which replaces torch.manual_seed
    before = _names()
    for device in ("cuda", "cuda:0", torch.device("cuda", 0), 0):
        with shardproof.cuda_on_cpu():
            found = _trained(device)
        assert {one.device.type for one in found} == {"cpu"}
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert _names() == before


def test_streams_events_devices_and_random_states_are_answered() -> None:
    with shardproof.cuda_on_cpu():
        assert (torch.cuda.device_count(), torch.cuda.current_device(), torch.cuda.get_device_name()) == (1, 0, "cpu")
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(torch.cuda.Stream()), torch.cuda.device(0), torch.cuda.nvtx.range("step"):
            start.record()
            x = torch.rand(3).cuda(non_blocking=True).pin_memory()
            x.record_stream(torch.cuda.current_stream())
            end.record()
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        torch.cuda.synchronize()
        assert start.elapsed_time(end) >= 0 and end.query()
        state = torch.cuda.get_rng_state()
        drawn = torch.rand(3, device="cuda")
        torch.cuda.set_rng_state(state)
        assert torch.equal(torch.rand(3), drawn)
        torch.cuda.manual_seed_all(3)
        assert torch.equal(torch.rand(3, device="cuda"), torch.rand(3, generator=torch.Generator().manual_seed(3)))
        properties = torch.cuda.get_device_properties(0)
        assert properties.total_memory > 0 and torch.cuda.memory_allocated() == 0
        assert properties.gcnArchName == properties.name  # else torch.compile raises AttributeError


def test_it_stays_until_the_last_one_of_several_threads_has_left() -> None:
    before, entered, leave = _names(), threading.Event(), threading.Event()

    def other() -> None:
        with shardproof.cuda_on_cpu(available=True):
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with shardproof.cuda_on_cpu():
        available = torch.cuda.is_available()
        thread.start()
        entered.wait(10)
        assert torch.cuda.is_available()
    assert torch.zeros(1, device="cuda").device.type == "cpu"
    leave.set()
    thread.join()
    assert _names() == before and torch.cuda.is_available() == available


class _ForGpus:
    """A subject that was written for GPUs only."""

    session = staticmethod(shardproof.cuda_on_cpu)

    def __call__(self, case: Case, device: torch.device) -> dict[str, Tensor]:
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
        x = torch.full((3,), float(dist.get_rank() + 1), device="cuda")
        with torch.cuda.stream(torch.cuda.Stream()):
            dist.all_reduce(x)
        torch.cuda.current_stream().synchronize()
        return {"loss/0": x.cuda().sum()}


def test_ranks_that_are_threads_share_it_as_their_session() -> None:
    with InprocEngine() as engine:
        run = execute(Case.parse("mode=tp tp=2"), _ForGpus(), engine, text="")
    assert [event.payload_bytes for event in run.events] == [12, 12]


def _compiler_imported_within() -> None:
    assert "torch._dynamo" not in sys.modules
    with shardproof.cuda_on_cpu():
        importlib.import_module("torch._dynamo")
        rules = sys.modules["torch._dynamo.trace_rules"]
        during = rules.get_torch_obj_rule_map()
        assert torch.cuda.synchronize in during
    assert torch.cuda.synchronize in rules.get_torch_obj_rule_map()


def test_the_compiler_may_be_imported_within_and_has_its_own_rules_afterwards(tmp_path: Path) -> None:
    process = started(_compiler_imported_within, folder=tmp_path)
    assert process.ended(120.0) == 0, process.err


def test_types_by_which_libraries_decide_are_those_of_cuda() -> None:
    """Megatron-Core's optimizer takes 'torch.cuda.FloatTensor' and refuses all others; types are taken, too."""
    plain, cuda = torch.ones(2), vars(torch.cuda)
    with shardproof.cuda_on_cpu():
        kinds = {torch.float32: "Float", torch.bfloat16: "BFloat16", torch.float16: "Half", torch.int64: "Long"}
        for dtype, kind in kinds.items():
            assert torch.ones(2, dtype=dtype).type() == f"torch.cuda.{kind}Tensor"
        assert nn.Parameter(plain).type() == "torch.cuda.FloatTensor"
        assert torch.ones(2, device="meta").type() == "torch.meta.FloatTensor"
        for wanted in ("torch.cuda.HalfTensor", "torch.HalfTensor", torch.float16, cuda["HalfTensor"]):
            assert plain.type(wanted).dtype == torch.float16 and plain.type(dtype=wanted).device.type == "cpu"
    assert plain.type() == "torch.FloatTensor"


def test_split_sizes_that_a_gpu_would_give_as_numbers_may_be_a_tensor() -> None:
    def program(rank: int) -> Tensor:
        sizes = torch.tensor([1, 2] if rank == 0 else [2, 1])
        out = torch.empty(3)
        dist.all_to_all_single(out, torch.arange(3.0) + 10 * rank, output_split_sizes=sizes, input_split_sizes=sizes)
        return out

    before = dist.all_to_all_single
    with shardproof.cuda_on_cpu(), InprocEngine() as engine:
        assert [out.tolist() for out in engine.run(program, world_size=2)] == [[0.0, 10.0, 11.0], [1.0, 2.0, 12.0]]
    assert dist.all_to_all_single is before
