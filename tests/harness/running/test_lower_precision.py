"""A lower precision inside a case: found (experts in bfloat16), or stated (mixed precision, a lossy wire)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from harness.engines.threads.inproc import InprocEngine
from harness.errors import RequestError
from harness.running.proof import CaseResult, prove
from harness.subject import case_of, named
from tests.harness import own_words
from tests.harness.own_words import Network

ROWS, WIDTH, INNER, LR = 4, 12, 32, 0.05


@pytest.fixture(scope="module")
def engine() -> Iterator[InprocEngine]:
    with InprocEngine() as engine:
        yield engine


def proved(subject: Any, text: str, engine: InprocEngine) -> CaseResult:
    given = named(subject)
    return prove(case_of(text, given), given, engine)


def unchecked(result: CaseResult) -> set[str]:
    return {name for verdict in result.verdicts for name in verdict.unchecked}


def told(result: CaseResult) -> str:
    return "\n".join(f"{one.check}: {one.verdict}: {one.message}" for one in result.verdicts if one.verdict != "pass")


class Experts(Network):
    """Its hidden layer is computed in a lower dtype, on one rank too; its truth has no such thing."""

    words = {**own_words.WORDS, "act": ("relu", "bf16", "fp16", "tenth")}
    cases = ("tp=2 dp=3 act=bf16 dtype=float32", "tp=2", "dp=2")
    alone = False  # no sum over the data ranks

    def truth(self, case: Any, device: torch.device) -> Mapping[str, Tensor]:
        """Dense training in the dtype of the case alone."""
        return own_words.truth(case.but(act="relu"), device)


@pytest.fixture
def acts(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_dtype(dtype: torch.dtype, factor: float = 1.0) -> Any:
        return lambda x: torch.relu(x.to(dtype)).to(x.dtype) * factor

    known = {"bf16": in_dtype(torch.bfloat16), "fp16": in_dtype(torch.float16), "tenth": in_dtype(torch.bfloat16, 1.1)}
    for name, act in known.items():
        monkeypatch.setattr(torch, name, act, raising=False)


@pytest.mark.usefixtures("acts")
@pytest.mark.parametrize("sizes", ["", "tp=2 dp=3"])
@pytest.mark.parametrize("act", ["bf16 dtype=float32", "fp16 dtype=float32", "bf16 dtype=float64"])
def test_experts_in_bfloat16_are_named_and_judged_by_its_limits(act: str, sizes: str, engine: InprocEngine) -> None:
    result = proved(Experts(), f"{sizes} act={act}", engine)
    assert result.verdict == "pass", told(result)
    dtype = {"bf16": "bfloat16", "fp16": "float16"}[act[:4]]
    said = f"errors below those of {dtype} (the {act.split('=')[1]} case uses {dtype}, which enters at "
    assert any(name.startswith(f"{said}tests/harness/running/test_lower") for name in unchecked(result))


@pytest.mark.usefixtures("acts")
def test_bfloat16_inside_is_no_excuse_for_a_factor_or_a_missing_sum(
    engine: InprocEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert proved(Experts(), "tp=2 dp=3 act=tenth dtype=float32", engine).verdict == "fail"
    whole = dist.all_reduce

    def summed(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        return None if tensor.dim() == 2 and tensor.shape[-1] == 12 else whole(tensor, *args, **kwargs)

    monkeypatch.setattr(dist, "all_reduce", summed)  # of the gradients of w1
    result = proved(Experts(), "dp=3 act=bf16 dtype=float32", engine)
    failed = {verdict.check: verdict.message for verdict in result.verdicts if verdict.verdict == "fail"}
    assert {"replicas", "parameter_gradients"} & set(failed)
    assert not any("rounding to bfloat16" in message for message in failed.values())


def weights(case: Any) -> nn.Module:
    torch.manual_seed(case.seed)
    drawn = [torch.randn(shape, dtype=torch.float64) * 0.3 for shape in ((INNER, WIDTH), (WIDTH, INNER))]
    model = nn.Sequential(nn.Linear(WIDTH, INNER, bias=False), nn.GELU(), nn.Linear(INNER, WIDTH, bias=False))
    with torch.no_grad():
        for parameter, weight in zip(model.parameters(), drawn, strict=True):
            parameter.copy_(weight)
    model = model.to(getattr(torch, case.dtype))
    with torch.no_grad():
        for parameter, weight in zip(model.parameters(), drawn, strict=True):
            parameter.copy_(weight)
    return model


def batch(case: Any, step: int, micro: int, dp_rank: int) -> Tensor:
    numbers = case.samples(step, micro, dp_rank, ROWS)
    rows = [torch.randn(WIDTH, generator=torch.Generator().manual_seed(n), dtype=torch.float64) for n in numbers]
    return torch.stack(rows).to(getattr(torch, case.dtype))


def trained(case: Any, model: nn.Module, ranks: range, share: float = 1.0) -> dict[str, Any]:
    """Training of the samples of these data ranks; DDP and FSDP take the mean over ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    outcome: dict[str, Any] = {}
    for step in range(case.steps):
        losses = []
        for micro in range(case.micro):
            for dp_rank in ranks:
                y = model(batch(case, step, micro, dp_rank))
                losses.append(y.square().mean() / case.micro / len(ranks) * share)
                losses[-1].backward()
        total = torch.stack([loss.detach() for loss in losses]).sum().to(getattr(torch, case.dtype))
        if case.world_size > 1 and len(ranks) == 1:
            dist.all_reduce(total)
            total /= case.dp
        outcome[f"loss/{step}"] = total
        named_ones = [(name.removeprefix("module."), one) for name, one in model.named_parameters()]
        if step == 0:
            outcome |= {f"grad/{name}": parameter.grad.clone() for name, parameter in named_ones}  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    return outcome | {f"param/{name}": parameter.detach() for name, parameter in named_ones}


def truth(case: Any, device: torch.device) -> Mapping[str, Any]:
    """Dense training."""
    return trained(case, weights(case), range(case.dp))


def in_bfloat16(group, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations with its own
    """torch's, without its question for CUDA."""
    sent = bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size())
    work = dist.all_reduce(sent, async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: bucket.buffer().copy_(done.value()[0]))


HOOKS = {"bf16": in_bfloat16, "fp16": fp16_compress_hook}


class Compressed:
    """DDP whose gradients travel in a lower dtype. `share` scales what rank 0 adds: any but 1 is a bug."""

    words = {"hook": ("bf16", "fp16"), "dtype": "float32"}
    cases = ("dp=3",)
    truth = staticmethod(truth)

    def __init__(self, share: float = 1.0) -> None:
        self.share = share

    def __call__(self, case: Any, device: torch.device) -> Mapping[str, Any]:
        rank = dist.get_rank()
        model = DistributedDataParallel(weights(case))
        if case.dp > 1:
            model.register_comm_hook(None, HOOKS[case.hook])
        return trained(case, model, range(rank, rank + 1), 1.0 if rank else self.share)


class Stated(Compressed):
    """The same, stated by a function of the case."""

    @staticmethod
    def wire_dtype(case: Any) -> Any:
        """Of DDP's hook."""
        return {"bf16": torch.bfloat16, "fp16": "float16"}[case.hook]


@pytest.mark.parametrize("case", ["dp=3", "dp=2 hook=fp16", "dp=2 dtype=float64"])
def test_a_stated_wire_has_the_limits_of_its_dtype(case: str, engine: InprocEngine) -> None:
    result = proved(Stated(), case, engine)
    assert result.verdict == "pass", told(result)
    dtype = "float16" if "fp16" in case else "bfloat16"
    by_check = {verdict.check: verdict.unchecked for verdict in result.verdicts}
    assert f"errors below those of {dtype} (the subject states wire_dtype={dtype})" in by_check["parameter_gradients"]


def test_an_unstated_wire_fails_and_its_cause_is_the_rounding(engine: InprocEngine) -> None:
    result = proved(Compressed(), "dp=3", engine)
    assert result.verdict == "fail"
    failed = [verdict.message for verdict in result.verdicts if verdict.verdict == "fail"]
    said = (
        "causes: explained by rounding to bfloat16: all its numbers are ones of it; where it is meant, subject.compute_"
    )
    assert failed and all(said in one for one in failed), failed


def test_sums_of_activations_that_travel_in_bfloat16(engine: InprocEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """On several ranks alone: wrong unless stated, and named with the line."""
    summed = own_words.Reduced.forward

    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        several = dist.get_world_size(group) > 1
        return summed(ctx, x.bfloat16() if several else x, group).to(x.dtype)

    class Sent(Network):
        """Its truth has no ranks."""

    monkeypatch.setattr(own_words.Reduced, "forward", staticmethod(forward))
    result = proved(Sent(), "tp=2 dtype=float32", engine)
    failed = [verdict.message for verdict in result.verdicts if verdict.verdict == "fail"]
    said = "causes: explained by rounding to bfloat16, which enters at tests/harness/running/test_lower_precision.py"
    assert failed and all(said in one for one in failed), failed
    stated = Sent()
    stated.wire_dtype = "bfloat16"  # type: ignore[attr-defined]
    result = proved(stated, "tp=2 dtype=float32", engine)
    assert result.verdict == "pass", told(result)
    stated.factor = 1.2
    assert proved(stated, "tp=2 dtype=float32", engine).verdict == "fail"


def test_gradients_that_are_rounded_behind_backward_are_no_part_of_the_model(
    engine: InprocEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the subject does so on one rank too."""
    right = own_words._stepped

    def rounded(parameters: Mapping[str, Tensor], step: int) -> dict[str, Tensor]:
        for parameter in parameters.values():
            assert parameter.grad is not None
            parameter.grad.copy_(parameter.grad.bfloat16())
        return right(parameters, step)

    class Rounding(Network):
        """Its truth is right."""

        def __call__(self, case: Any, device: torch.device) -> Mapping[str, Any]:
            monkeypatch.setattr(own_words, "_stepped", rounded)
            return super().__call__(case, device)

        @staticmethod
        def truth(case: Any, device: torch.device) -> Mapping[str, Tensor]:
            monkeypatch.setattr(own_words, "_stepped", right)
            return own_words.truth(case, device)

    for dtype in ("float64", "float32"):
        result = proved(Rounding(), f"tp=2 dtype={dtype}", engine)
        failed = {verdict.check: verdict.message for verdict in result.verdicts if verdict.verdict == "fail"}
        assert (
            "causes: explained by rounding to bfloat16: all its numbers are ones of it" in failed["parameter_gradients"]
        )


def test_a_failure_beyond_the_limits_of_bfloat16_counts_in_its_epsilons(engine: InprocEngine) -> None:
    (message,) = (
        one.message for one in proved(Stated(0.0), "dp=3", engine).verdicts if one.check == "parameter_gradients"
    )
    error = next(line for line in message.splitlines() if line.startswith("error:"))
    found, allowed = (float(part.split()[0].strip("(")) for part in error.split("(")[1:3])
    assert 10 < found < 1000 and 3 < allowed < 10, error


@pytest.mark.parametrize("share", [0.0, 1.25])
def test_a_stated_wire_hides_no_term(share: float, engine: InprocEngine) -> None:
    """A rank whose term is left out, or weighs more."""
    result = proved(Stated(share), "dp=3", engine)
    failed = {verdict.check for verdict in result.verdicts if verdict.verdict == "fail"}
    assert {"forward", "parameter_gradients"} <= failed
    assert not any("rounding to" in verdict.message for verdict in result.verdicts)


def test_what_the_stated_wire_does_not_reach_keeps_its_own_limits(engine: InprocEngine) -> None:
    """The loss of the first step does not travel in bfloat16: half a percent is wrong, little as that is for it."""

    class Off(Stated):
        def __call__(self, case: Any, device: torch.device) -> Mapping[str, Any]:
            outcome = super().__call__(case, device)
            return {**outcome, "loss/0": outcome["loss/0"] * 1.005}

    result = proved(Off(), "dp=3", engine)
    assert [verdict.check for verdict in result.verdicts if verdict.verdict == "fail"] == ["forward"]


class Mixed:
    """FSDP2 whose parameters are gathered, and products computed, in bfloat16. `share` as in Compressed."""

    words = {"dtype": "float32"}
    cases = ("dp=2",)
    truth = staticmethod(truth)
    compute_dtype = "bfloat16"

    def __init__(self, share: float = 1.0) -> None:
        self.share = share

    def __call__(self, case: Any, device: torch.device) -> Mapping[str, Any]:
        model, rank = weights(case), dist.get_rank()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        fully_shard(model, mesh=dist.init_device_mesh("cpu", (case.dp,)), mp_policy=policy)
        return trained(case, model, range(rank, rank + 1), self.share)


@pytest.mark.parametrize("case", ["dp=2", "dp=2 steps=4", "dp=2 dtype=float64"])
def test_stated_mixed_precision_has_the_limits_of_its_dtype(case: str, engine: InprocEngine) -> None:
    result = proved(Mixed(), case, engine)
    assert result.verdict == "pass", told(result)
    assert any("(the subject states compute_dtype=bfloat16)" in name for name in unchecked(result))


def test_stated_mixed_precision_hides_no_factor(engine: InprocEngine) -> None:
    assert proved(Mixed(share=1.15), "dp=2", engine).verdict == "fail"
    assert proved(Mixed(share=0.5), "dp=2", engine).verdict == "fail"


def test_stated_mixed_precision_hides_no_missing_step(engine: InprocEngine) -> None:
    """Parameters are kept in float32: their limits are what bfloat16 gradients make of them, not bfloat16's own."""

    class Late(Mixed):
        def __call__(self, case: Any, device: torch.device) -> Mapping[str, Any]:
            outcome = super().__call__(case, device)
            before = super().__call__(case.but(steps=case.steps - 1), device)
            return {**outcome, **{name: before[name] for name in outcome if name.startswith("param/")}}

    result = proved(Late(), "dp=2", engine)
    assert "update" in {verdict.check for verdict in result.verdicts if verdict.verdict == "fail"}


def test_what_is_right_without_it_keeps_the_limits_of_the_case(engine: InprocEngine) -> None:
    class Exact(Network):
        compute_dtype, wire_dtype = "bfloat16", "float16"

    result = proved(Exact(), "tp=2 dp=3 dtype=float32", engine)
    assert result.verdict == "pass" and not any("errors below" in name for name in unchecked(result))


@pytest.mark.parametrize("name", ["compute_dtype", "wire_dtype"])
def test_what_is_no_dtype_is_refused_before_anything_is_run(name: str, engine: InprocEngine) -> None:
    class Wrong(Network):
        def __call__(self, case: Any, device: torch.device) -> Mapping[str, Any]:
            raise AssertionError("was run")

    for said in ("bf16", lambda case: 16):
        subject = Wrong()
        setattr(subject, name, said)
        with pytest.raises(RequestError, match=f"{name}=(bf)?16 must be a dtype's word.*; legal: {name} = 'bfloat16'"):
            proved(subject, "tp=2", engine)
