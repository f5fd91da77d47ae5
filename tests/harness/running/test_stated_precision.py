"""A stated lower precision: DDP's hook, FSDP2's mixed precision; its limits, and no excuse for a bug.

What they state right is proved as a system of `bench/systems.txt`, too.
"""

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

from harness.engines.threads.inproc import InprocEngine
from suites.subjects import ddp, hsdp
from tests.harness.proofs import contradicted, proved, told, unchecked, verdict_of

HOOKED = "dp=3 micro=1 hook=fp16_compress dtype=float32"
MIXED = "dp=2 replicas=1 low=true"


class Stating:
    """A subject of the suites, which states something else of itself."""

    def __init__(self, module: ModuleType, **stated: Any) -> None:
        vars(self).update({**vars(module.subject), **stated, "call": module.subject})

    def __call__(self, case: Any, device: torch.device) -> Mapping[str, Any]:
        outcome: Mapping[str, Any] = self.call(case, device)  # type: ignore[attr-defined]
        return outcome


def scaled_on(ranks: range, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: the losses of these ranks, and not of the truth, count more or less."""
    right = functional.cross_entropy

    def wrong(*given: Any) -> Any:
        return right(*given) * (share if dist.is_initialized() and dist.get_rank() in ranks else 1.0)

    monkeypatch.setattr(functional, "cross_entropy", wrong)


def test_a_wire_has_the_limits_of_its_dtype_where_it_is_stated(engine: InprocEngine) -> None:
    stated, unstated = (Stating(ddp, wire_dtype=dtype) for dtype in (lambda case: torch.float16, None))
    result = proved(stated, "dp=3 hook=fp16_compress", engine)
    assert result.verdict == "pass", told(result)
    by_check = {verdict.check: verdict.unchecked for verdict in result.verdicts}
    said = "errors below those of float16 (the subject states wire_dtype=float16)"
    assert said in by_check["parameter_gradients"]
    assert "parameter_gradients" in contradicted(proved(unstated, HOOKED, engine, explain=False))


@pytest.mark.parametrize("share", [0.0, 1.25])
def test_a_stated_wire_hides_no_term(share: float, monkeypatch: pytest.MonkeyPatch, engine: InprocEngine) -> None:
    """A rank whose term is left out, or weighs more. What is wrong is counted in the epsilons of float16."""
    scaled_on(range(1), share, monkeypatch)
    result = proved(ddp.subject, HOOKED, engine)
    assert {"forward", "parameter_gradients"} <= contradicted(result)
    assert not any("rounding to" in verdict.message for verdict in result.verdicts)
    message = verdict_of(result, "parameter_gradients").message
    error = next(line for line in message.splitlines() if line.startswith("error:"))
    found, allowed = (float(part.split()[0].strip("(")) for part in error.split("(")[1:3])
    assert 30 < found < 10_000 and 3 < allowed < 40, error


def test_what_the_stated_wire_does_not_reach_keeps_its_own_limits(engine: InprocEngine) -> None:
    """The loss of the first step does not travel in float16: a thousandth is wrong, little as that is for it."""

    def off(case: Any, device: torch.device) -> Mapping[str, Any]:
        outcome = ddp.subject(case, device)
        return {**outcome, "loss/0": outcome["loss/0"] * 1.001}

    vars(off).update(vars(ddp.subject))
    assert contradicted(proved(off, HOOKED, engine, explain=False)) == {"forward"}


@pytest.mark.parametrize("more", ["dtype=float32 steps=4", "dtype=float64"])
def test_stated_mixed_precision_has_the_limits_of_its_dtype(more: str, engine: InprocEngine) -> None:
    result = proved(hsdp.subject, f"{MIXED} {more}", engine)
    assert result.verdict == "pass", told(result)
    assert any("(the subject states compute_dtype=bfloat16)" in name for name in unchecked(result))


def test_stated_mixed_precision_hides_no_factor_and_no_missing_step(
    engine: InprocEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters are kept in float32: their limits are what bfloat16 gradients make of them, not bfloat16's own."""

    def late(case: Any, device: torch.device) -> Mapping[str, Any]:
        outcome, before = hsdp.subject(case, device), hsdp.subject(case.but(steps=case.steps - 1), device)
        return {**outcome, **{name: before[name] for name in outcome if name.startswith("param/")}}

    vars(late).update(vars(hsdp.subject))
    assert "update" in contradicted(proved(late, f"{MIXED} dtype=float32", engine, explain=False))
    scaled_on(range(2), 1.15, monkeypatch)
    assert proved(hsdp.subject, f"{MIXED} dtype=float32", engine, explain=False).verdict == "fail"
