"""A lower precision inside a case: named, judged by its limits, and no excuse for a bug.

The precision is found, or stated: DDP's hook, FSDP2's mixed precision. Right ones are systems of `bench/systems.txt`.
"""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from shardproof.harness.dense_model import read_case
from shardproof.harness.engines.threads.inproc import InprocEngine
from shardproof.harness.errors import RequestError
from shardproof.harness.recording.capturing.operator_probes import NarrowProbe, Probed
from shardproof.harness.running.ranks.execution import execute
from shardproof.harness.subject import resolve_subject
from shardproof.suites.subjects import ddp, hsdp
from tests.deep import deep
from tests.harness import own_words
from tests.harness.noted import names_of, reasons_of
from tests.harness.own_words import Network
from tests.harness.proofs import contradicted, planted_on_ranks, proved, told, unchecked, verdict_of
from tests.harness.toy_subjects import Changed

HERE, SHORT = "tests/harness/running/test_lower_precision.py", "micro=1 steps=1"


class Experts(Network):
    """A subject whose hidden layer computes in a lower dtype, also on one rank; its truth does not."""

    words = {**own_words.WORDS, "act": ("relu", "bf16", "fp16", "fp32", "tenth", "little")}
    cases = ("tp=2 dp=3 act=bf16 dtype=float32", "tp=2", "dp=2")
    alone = False  # no sum over the data ranks

    def truth(self, case: Any, device: torch.device) -> Mapping[str, Tensor]:
        return own_words.truth(case.but(act="relu"), device)


@pytest.fixture
def acts(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_dtype(dtype: torch.dtype, factor: float = 1.0) -> Any:
        return lambda x: torch.relu(x.to(dtype)).to(x.dtype) * factor

    known = {"bf16": in_dtype(torch.bfloat16), "fp16": in_dtype(torch.float16), "fp32": in_dtype(torch.float32)}
    known |= {"tenth": in_dtype(torch.bfloat16, 1.1), "little": in_dtype(torch.float32, 1.0001)}
    for name, act in known.items():
        monkeypatch.setattr(torch, name, act, raising=False)


@pytest.mark.usefixtures("acts")
@pytest.mark.parametrize(
    ("act", "sizes"),
    [
        ("bf16 dtype=float32", ""),
        ("bf16 dtype=float64", "tp=2 dp=3"),
        ("fp16 dtype=float32", "tp=2 dp=3"),
        ("fp32 dtype=float64", "tp=2 dp=3"),
    ],
)
def test_experts_in_a_lower_dtype_are_named_and_have_its_limits(act: str, sizes: str) -> None:
    result = proved(Experts(), f"{sizes} act={act} {SHORT}")
    assert result.verdict == "pass", told(result)
    dtype = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[act[:4]]
    said = f"the {act.split('=')[1]} case uses {dtype}, which enters at tests/harness/running/test_lower"
    assert dtype in unchecked(result) and any(each.startswith(said) for each in unchecked(result))


@pytest.mark.usefixtures("acts")
def test_bfloat16_inside_is_no_excuse_for_a_factor_or_a_missing_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    for act in ("tenth dtype=float32", "little"):  # 0.01 % is no rounding of float32
        assert proved(Experts(), f"tp=2 dp=3 act={act} {SHORT}", explain=False).verdict == "fail"
    whole = dist.all_reduce

    def summed(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        return None if tensor.dim() == 2 and tensor.shape[-1] == 12 else whole(tensor, *args, **kwargs)

    monkeypatch.setattr(dist, "all_reduce", summed)  # of the gradients of w1
    result = proved(Experts(), f"dp=3 act=bf16 dtype=float32 {SHORT}")
    assert {"replicas", "parameter_gradients"} & contradicted(result)
    assert not any("rounding to bfloat16" in one.message for one in result.verdicts if one.verdict == "fail")


def sums_travel_in(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let sums over more than one rank travel in this dtype."""
    summed = own_words.Reduced.forward

    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        total: Tensor = summed(ctx, x.to(dtype) if dist.get_world_size(group) > 1 else x, group)
        return total.to(x.dtype)

    monkeypatch.setattr(own_words.Reduced, "forward", staticmethod(forward))


def test_sums_of_activations_that_travel_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong unless stated, and named with the line."""
    sums_travel_in(torch.bfloat16, monkeypatch)
    result = proved(Network(), f"tp=2 dtype=float32 {SHORT}")
    messages = [verdict.message for verdict in result.verdicts if verdict.verdict == "fail"]
    said = f"causes: explained by rounding to bfloat16, which enters at {HERE}"
    assert messages and all(said in one for one in messages), messages
    result = proved(Network(wire_dtype="bfloat16"), f"tp=2 dtype=float32 {SHORT}")
    assert result.verdict == "pass", told(result)
    assert proved(Network(1.2, wire_dtype="bfloat16"), f"tp=2 dtype=float32 {SHORT}", explain=False).verdict == "fail"


def test_bfloat16_that_reaches_nothing_on_one_rank_is_no_part_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank rounds as well, to send what no rank receives. Found in a mixer whose context ranks send states."""

    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        parts = [torch.empty_like(x, dtype=torch.bfloat16) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.bfloat16(), group=group)
        others = [part.to(x.dtype) * (rank != dist.get_rank(group)) for rank, part in enumerate(parts)]
        return x + torch.stack(others).sum(0)

    monkeypatch.setattr(own_words.Reduced, "forward", staticmethod(forward))
    result = proved(Network(), f"tp=2 dp=3 {SHORT}")
    messages = [verdict.message for verdict in result.verdicts if verdict.verdict == "fail"]
    said = f"causes: explained by rounding to bfloat16, which enters at {HERE}"
    assert messages and all(said in one for one in messages), told(result)


@pytest.mark.parametrize(
    ("calls", "verdict"), [("all_reduce over tp", "pass"), ("all_reduce over dp", "fail"), ("all_gather", "fail")]
)
def test_a_wire_is_stated_by_op_and_axis(calls: str, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A statement about one call says nothing of other calls in the same dtype."""
    sums_travel_in(torch.bfloat16, monkeypatch)
    result = proved(Network(wire_dtype={calls: "bfloat16"}), f"tp=2 dtype=float32 {SHORT}", explain=False)
    assert result.verdict == verdict, told(result)
    stated = "the subject states wire_dtype=bfloat16 of all_reduce over tp"
    assert any(stated in one for one in unchecked(result)) == (verdict == "pass")


def test_gradients_that_are_rounded_behind_backward_are_no_part_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds although the subject rounds them on one rank too."""
    right = own_words._stepped

    def rounded(parameters: Mapping[str, Tensor], step: int) -> dict[str, Tensor]:
        for parameter in parameters.values():
            assert parameter.grad is not None
            parameter.grad.copy_(parameter.grad.bfloat16())
        return right(parameters, step)

    rounding = planted_on_ranks(monkeypatch, Network(), own_words, "_stepped", rounded)
    for dtype in ("float64", "float32"):
        result = proved(rounding, f"tp=2 dtype={dtype} {SHORT}")
        message = verdict_of(result, "parameter_gradients").message
        assert "causes: explained by rounding to bfloat16: all its numbers are ones of it" in message


def test_what_is_right_without_it_keeps_the_limits_of_the_case() -> None:
    exact = Network(compute_dtype="bfloat16", wire_dtype="float16")
    result = proved(exact, "tp=2 dp=3 dtype=float32")
    assert result.verdict == "pass" and not any("errors below" in name for name in unchecked(result))


@pytest.mark.parametrize("name", ["compute_dtype", "wire_dtype"])
def test_what_is_no_dtype_is_refused_before_anything_is_run(name: str) -> None:
    for said in ("bf16", lambda case: 16):
        subject = Changed(Network(), lambda case, outcome: pytest.fail("was run"), **{name: said})
        with pytest.raises(RequestError, match=f"{name}=(bf)?16 must be a dtype's word.*; legal: {name} = 'bfloat16'"):
            proved(subject, "tp=2")


@pytest.mark.parametrize(("shy", "verdict"), [(False, "fail"), (True, "unknown")])
def test_on_several_ranks_alone_it_is_wrong(shy: bool, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model does not round so. If no run on one rank can show that, the case stays unknown."""
    sums_travel_in(torch.float32, monkeypatch)
    summing = Network(refuses=lambda case: "needs ranks" if shy and case.world_size == 1 else "")
    result = proved(summing, f"tp=2 dp=3 {SHORT}")
    assert result.verdict == verdict
    messages = [one.message for one in result.verdicts if one.verdict == verdict and one.check != "regrouping"]
    assert messages and all(f"float32, which enters at {HERE}" in one for one in messages)


def test_our_own_subject_has_none(engine: InprocEngine) -> None:
    case = read_case("mode=isp tp=2 dp=2 wp=2 layers=1 seq=8 optimizer=adamw clip=0.1 metric=true recompute=full")
    run = execute(
        case,
        Probed(resolve_subject("shardproof.parallel.subject:subject"), NarrowProbe),
        engine,
        text=str(case),
        record=False,
    )
    assert run.outcomes == ({},) * 4


@pytest.mark.parametrize("truth", ["", "alone"])
def test_constants_that_both_sides_cast_are_no_excuse(truth: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = own_words.weights

    def cast(case: Any) -> tuple[Tensor, ...]:
        return tuple(torch.tensor(w.tolist(), dtype=torch.float32).to(w.dtype) for w in drawn(case))

    monkeypatch.setattr(own_words, "weights", cast)
    monkeypatch.setattr(torch, "relu", lambda x: x.clamp_min(0) * torch.tensor(0.3))  # a table in float32
    assert proved(Network(), f"tp=2 dp=3 {SHORT}", truth=truth).verdict == "pass"
    too_large = Network(lambda case: 1 + 1e-8 if case.tp > 1 else 1.0)
    wrong = proved(too_large, f"tp=2 dp=3 {SHORT}", truth=truth, explain=False)
    assert {"forward", "parameter_gradients"} <= contradicted(wrong)


HOOKED = "dp=3 layers=1 micro=1 hook=fp16_compress dtype=float32"
MIXED = "dp=2 replicas=1 low=true layers=1 micro=1"


def scaled_on(ranks: range, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: the losses of these ranks, and not of the truth, count more or less."""
    right = functional.cross_entropy

    def wrong(*given: Any) -> Any:
        return right(*given) * (share if dist.is_initialized() and dist.get_rank() in ranks else 1.0)

    monkeypatch.setattr(functional, "cross_entropy", wrong)


def test_a_wire_has_the_limits_of_its_dtype_where_it_is_stated() -> None:
    stated, unstated = (Changed(ddp.subject, wire_dtype=dtype) for dtype in (lambda case: torch.float16, None))
    result = proved(stated, "dp=3 layers=1 micro=1 steps=1 hook=fp16_compress")
    assert result.verdict == "pass", told(result)
    gradients = verdict_of(result, "parameter_gradients")
    assert names_of(gradients, "lower precision") == ["float16"]
    assert "the subject states wire_dtype=float16" in reasons_of(gradients)
    assert "parameter_gradients" in contradicted(proved(unstated, HOOKED, explain=False))


@pytest.mark.parametrize("share", [1.25, *deep("three CPU seconds", 0.0)])
def test_a_stated_wire_hides_no_term(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank whose term is left out, or weighs more. Errors are counted in the epsilons of float16."""
    scaled_on(range(1), share, monkeypatch)
    result = proved(ddp.subject, HOOKED)
    assert {"forward", "parameter_gradients"} <= contradicted(result)
    assert not any("rounding to" in verdict.message for verdict in result.verdicts)
    message = verdict_of(result, "parameter_gradients").message
    error = next(line for line in message.splitlines() if line.startswith("error:"))
    found, allowed = (float(part.split()[0].strip("(")) for part in error.split("(")[1:3])
    assert 30 < found < 10_000 and 1 < allowed < 40, error


def test_what_the_stated_wire_does_not_reach_keeps_its_own_limits() -> None:
    """The loss of the first step does not travel in float16: a thousandth is wrong, little as that is for it."""

    off = Changed(ddp.subject, lambda case, outcome: {"loss/0": outcome["loss/0"] * 1.001})
    assert contradicted(proved(off, HOOKED, explain=False)) == {"forward"}


@pytest.mark.parametrize("more", ["dtype=float64", *deep("eight CPU seconds", "dtype=float32 steps=4")])
def test_stated_mixed_precision_has_the_limits_of_its_dtype(more: str) -> None:
    result = proved(hsdp.subject, f"{MIXED} {more}")
    assert result.verdict == "pass", told(result)
    assert {"bfloat16", "the subject states compute_dtype=bfloat16"} <= unchecked(result)


def test_stated_mixed_precision_hides_no_factor_and_no_missing_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters are kept in float32: their limits are what bfloat16 gradients make of them, not bfloat16's own."""

    def late(case: Any, outcome: Any) -> Mapping[str, Any]:
        before = hsdp.subject(case.but(steps=case.steps - 1), torch.device("cpu"))
        return {name: value for name, value in before.items() if name.startswith("param/")}

    assert "update" in contradicted(proved(Changed(hsdp.subject, late), f"{MIXED} dtype=float32", explain=False))
    scaled_on(range(2), 1.15, monkeypatch)
    assert proved(hsdp.subject, f"{MIXED} steps=1 dtype=float32", explain=False).verdict == "fail"
