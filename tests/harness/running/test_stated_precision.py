"""A stated lower precision: DDP's hooks, FSDP2's mixed precision; its limits, and no excuse for a bug."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from harness.engines.threads.inproc import InprocEngine
from tests.harness.proofs import contradicted, proved, told, unchecked, verdict_of

ROWS, WIDTH, INNER, LR = 4, 12, 32, 0.05


def weights(case: Any) -> nn.Module:
    torch.manual_seed(case.seed)
    drawn = [torch.randn(shape, dtype=torch.float64) * 0.3 for shape in ((INNER, WIDTH), (WIDTH, INNER))]
    model = nn.Sequential(nn.Linear(WIDTH, INNER, bias=False), nn.GELU(), nn.Linear(INNER, WIDTH, bias=False))
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
        return {"bf16": torch.bfloat16, "fp16": "float16"}[case.hook]


@pytest.mark.parametrize("case", ["dp=3 dtype=float64", "dp=2 hook=fp16"])
def test_a_stated_wire_has_the_limits_of_its_dtype(case: str, engine: InprocEngine) -> None:
    result = proved(Stated(), case, engine)
    assert result.verdict == "pass", told(result)
    dtype = "float16" if "fp16" in case else "bfloat16"
    by_check = {verdict.check: verdict.unchecked for verdict in result.verdicts}
    assert f"errors below those of {dtype} (the subject states wire_dtype={dtype})" in by_check["parameter_gradients"]


def test_an_unstated_wire_fails_and_its_cause_is_the_rounding(engine: InprocEngine) -> None:
    result = proved(Compressed(), "dp=3", engine)
    assert result.verdict == "fail"
    messages = [verdict.message for verdict in result.verdicts if verdict.verdict == "fail"]
    said = "causes: explained by rounding to bfloat16: all its numbers are ones of it; where it is meant, subject."
    assert messages and all(said in one for one in messages), messages


def test_a_failure_beyond_the_limits_of_bfloat16_counts_in_its_epsilons(engine: InprocEngine) -> None:
    message = verdict_of(proved(Stated(0.0), "dp=3", engine), "parameter_gradients").message
    error = next(line for line in message.splitlines() if line.startswith("error:"))
    found, allowed = (float(part.split()[0].strip("(")) for part in error.split("(")[1:3])
    assert 10 < found < 1000 and 3 < allowed < 10, error


@pytest.mark.parametrize("share", [0.0, 1.25])
def test_a_stated_wire_hides_no_term(share: float, engine: InprocEngine) -> None:
    """A rank whose term is left out, or weighs more."""
    result = proved(Stated(share), "dp=3", engine)
    assert {"forward", "parameter_gradients"} <= contradicted(result)
    assert not any("rounding to" in verdict.message for verdict in result.verdicts)


def test_what_the_stated_wire_does_not_reach_keeps_its_own_limits(engine: InprocEngine) -> None:
    """The loss of the first step does not travel in bfloat16: half a percent is wrong, little as that is for it."""

    class Off(Stated):
        def __call__(self, case: Any, device: torch.device) -> Mapping[str, Any]:
            outcome = super().__call__(case, device)
            return {**outcome, "loss/0": outcome["loss/0"] * 1.005}

    assert contradicted(proved(Off(), "dp=3", engine)) == {"forward"}


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


@pytest.mark.parametrize("case", ["dp=2 steps=4", "dp=2 dtype=float64"])
def test_stated_mixed_precision_has_the_limits_of_its_dtype(case: str, engine: InprocEngine) -> None:
    result = proved(Mixed(), case, engine)
    assert result.verdict == "pass", told(result)
    assert any("(the subject states compute_dtype=bfloat16)" in name for name in unchecked(result))


def test_stated_mixed_precision_hides_no_factor_and_no_missing_step(engine: InprocEngine) -> None:
    """Parameters are kept in float32: their limits are what bfloat16 gradients make of them, not bfloat16's own."""

    class Late(Mixed):
        def __call__(self, case: Any, device: torch.device) -> Mapping[str, Any]:
            outcome = super().__call__(case, device)
            before = super().__call__(case.but(steps=case.steps - 1), device)
            return {**outcome, **{name: before[name] for name in outcome if name.startswith("param/")}}

    assert proved(Mixed(share=1.15), "dp=2", engine).verdict == "fail"
    assert "update" in contradicted(proved(Late(), "dp=2", engine))
