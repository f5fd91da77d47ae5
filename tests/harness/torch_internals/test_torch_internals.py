"""The private names of torch: every probe works here, what lacks a name does without or says so in one sentence."""

import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema

from shardproof.harness.engines.threads.process_group import InprocGroup
from shardproof.harness.errors import MachineError
from shardproof.harness.torch_internals import autograd, compiler, dispatch, lookup, world
from shardproof.harness.torch_internals.lookup import find_name
from shardproof.harness.torch_internals.sharding import Decisions
from shardproof.reports.commands import cli
from tests.harness.recording.toy_calls import recorded
from tests.harness.torch_internals.probes import PROBES, Probe


@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.feature.replace(" ", "_"))
def test_every_feature_works_with_this_torch(probe: Probe) -> None:
    assert probe.works(), f"{probe.names}: {probe.otherwise}"


def test_a_name_that_torch_lacks_is_a_sentence_when_it_is_needed() -> None:
    missing = find_name(torch, "_no_such_name", "flying")
    with pytest.raises(MachineError, match=r"^flying is not available .*torch\._no_such_name; legal: torch 2"):
        missing(1, two=2)


def test_dtensor_decides_again_where_the_decision_may_differ() -> None:
    propagator, aten, decisions = DTensor._op_dispatcher.sharding_propagator, torch.ops.aten, Decisions()
    meshes = [DeviceMesh("cpu", [0, 1], _init_backend=False, _rank=rank) for rank in (0, 1)]

    def decided(mesh: DeviceMesh, op: Any, *words: object) -> tuple[torch.dtype, Any]:
        meta = TensorMeta(torch.Size([3]), (1,), torch.int64)
        spec = DTensorSpec(mesh, (Shard(0),), tensor_meta=meta)
        found: Any = propagator.propagate_op_sharding_non_cached(OpSchema(op, (spec, *words), {}))
        assert found.output_spec.mesh is mesh and found.output_spec.placements == (Shard(0),)
        local = found.redistribute_schema.args_schema[1] if found.redistribute_schema else None
        return found.output_spec.tensor_meta.dtype, local

    for _ in "twice":
        with decisions.share_decisions():
            assert [decided(meshes[0], aten.mul.Tensor, factor)[0] for factor in (2, True, 2.0)] == [
                torch.int64,
                torch.int64,
                torch.float32,
            ]
            assert [decided(mesh, aten.view.default, [3])[1] for mesh in meshes] == [(2,), (1,)], "uneven shards"
            torch.set_default_dtype(torch.float64)
            try:
                assert decided(meshes[0], aten.mul.Tensor, 2.0)[0] is torch.float64
            finally:
                torch.set_default_dtype(torch.float32)
    rules = propagator.op_strategy_funcs
    rule = rules[aten.view.default]
    rules[aten.view.default] = lambda _: (_ for _ in ()).throw(ValueError("a rule that a program registered"))
    try:
        with decisions.share_decisions(), pytest.raises(ValueError, match="that a program registered"):
            decided(meshes[0], aten.view.default, [3])
    finally:
        rules[aten.view.default] = rule


def test_a_version_is_noted_when_it_was_not_tested() -> None:
    assert [lookup.untested_note(version) for version in ("2.11.0", "2.14.1+cu130", "2.15.0")] == [""] * 3
    for version in ("2.10.1", "2.16.0a0+git1"):
        assert f"{version} was not tested" in lookup.untested_note(version)


def test_a_run_under_an_untested_torch_works_and_notes_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    monkeypatch.setattr(lookup, "TESTED", ((2, 1), (2, 2)))
    assert cli.main(["run", "tp=2 layers=1 seq=8 micro=1 steps=1", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert f"note: torch {torch.__version__} was not tested: shardproof was tested with 2.1 to 2.2" in printed
    assert "was not tested" in (tmp_path / "latest" / "env.json").read_text()


def test_an_engine_that_torch_cannot_carry_ends_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    monkeypatch.setattr(world, "_missing_internals", lambda: ["distributed_c10d._world"])
    world._ranked_world.cache_clear()
    try:
        assert cli.main(["run", "mode=tp tp=2", "--out", str(tmp_path)]) == 3
    finally:
        world._ranked_world.cache_clear()
    out, err = capsys.readouterr()
    assert "the in-process engine is not available with torch" in out + err
    assert "Traceback" not in err and "a bug in shardproof" not in err


def summed(x: Tensor) -> Tensor:
    total = x.clone()
    dist.all_reduce(total)
    return total


class Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return summed(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0]


class Apart(Summed):
    @staticmethod
    def forward(x: Tensor) -> Tensor:  # type: ignore[override]
        return summed(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing to keep."""


class Head(nn.Module):
    """A module without parameters: sums in a Function, without gradients, and by a Function's forward called alone."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.function.apply(x)
        with torch.no_grad():
            dist.all_reduce(x.detach().clone())
            Summed.forward(None, x)
        return loss.sum()


@pytest.mark.parametrize("native", [False, True], ids=["as_here", "apply_is_native"])
@pytest.mark.parametrize("function", [Summed, Apart])
def test_a_loss_in_a_function_is_no_metric(monkeypatch: pytest.MonkeyPatch, function: Any, native: bool) -> None:
    """Up to torch 2.13 Function.apply has a frame, since 2.14 it has none: both ways find the Function's forward."""
    if native:
        monkeypatch.setattr(autograd, "_APPLY", None)
    events = recorded(lambda _rank: Head(function)(nn.Linear(2, 2)(torch.ones(2))).backward())
    phases = [event.phase for event in events if event.rank == 0]
    assert phases == ["loss", "metric", "metric"]


def test_fallbacks_do_what_they_stand_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_copy_each", None)
    outputs = [torch.zeros(2), torch.zeros(3)]
    dispatch.copy_each(outputs, [torch.ones(2), torch.full((3,), 2.0)])
    assert [output.tolist() for output in outputs] == [[1.0, 1.0], [2.0, 2.0, 2.0]]
    monkeypatch.setattr(dispatch, "_keys_included", None)
    assert dispatch.thread_switches() != dispatch.thread_switches()
    monkeypatch.setattr(autograd, "_unversioned", None)
    tensor = torch.ones(1)
    with autograd.without_version((tensor,)):
        tensor.add_(1)
    assert tensor.item() == 2.0
    assert autograd.generator_address(torch.Generator()) is not None
    code = sys._getframe().f_code
    monkeypatch.setattr(torch._C._dynamo.eval_frame, "set_code_exec_strategy", None)
    with pytest.raises(TypeError):
        compiler.not_compiled(code)


def test_the_compiler_starts_at_no_code_of_the_harness(monkeypatch: pytest.MonkeyPatch) -> None:
    keep, kept = compiler.not_compiled, list[Any]()

    def note(code: Any) -> None:
        kept.append(code)
        keep(code)

    monkeypatch.setattr(compiler, "not_compiled", note)
    for known in (compiler._keep_uncompiled, compiler._keep_module_uncompiled):
        known.cache_clear()
    compiler.leave_uncompiled()
    assert InprocGroup.broadcast.__code__ in kept


def test_a_backward_that_accumulates_is_told_however_it_begins() -> None:
    told: list[Any] = []
    x = torch.ones(1, requires_grad=True)
    with autograd.told_of_backward(lambda tensors, gradients: told.append((*tensors, *gradients))):
        for loss in (x.sum(), x.prod()):
            loss.backward()
        torch.autograd.grad(x.sum(), x)
        by_engine = x.mean()
        torch.autograd.Variable._execution_engine.run_backward(  # as Megatron-Core's pipelines do
            tensors=(by_engine,),
            grad_tensors=(torch.ones(()),),
            keep_graph=False,
            create_graph=False,
            inputs=(),
            allow_unreachable=True,
            accumulate_grad=True,
        )
    assert len(told) == 3 and told[-1][0] is by_engine and x.grad is not None and x.grad.item() == 3
