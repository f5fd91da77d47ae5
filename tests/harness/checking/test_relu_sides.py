"""A right result whose relu went the other way is no failure; a wrong one of the same case still is."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from harness.checking.evidence import FAIL, PASS
from harness.engines.threads.inproc import InprocEngine
from harness.reproducing.repro import shrunk
from harness.running.proof import prove
from harness.running.trials import rounding
from harness.running.truth.reference import REFERENCE, Reference
from parallel.subject import subject
from reference.case import Case

CASE = Case.parse(
    "mode=mtp family=internlm2 hidden=36 heads=6 kv_heads=2 activation=relu ffn=16 vocab=346 tied=true seq=7 "
    "head=gather cross_entropy=fused recompute=selective overlap=false lr=0.1 label_smoothing=0.1 dtype=bfloat16 "
    "seed=2455"
)
"""Found by `bench.clean`: one element of a relu's input lies so near zero that no control run takes its side, but for
those of FURTHER_PARTS.
"""


def doubled(case: Case, device: torch.device) -> dict[str, Any]:
    """Our subject, with one gradient twice as large."""
    outcome: dict[str, Any] = dict(subject(case, device))
    name = "grad/layers.1.mlp.w1.weight"
    outcome[name] = tuple(dataclasses.replace(box, local=2 * box.local) for box in outcome[name])
    return outcome


@pytest.mark.parametrize("reference", [REFERENCE, Reference()])
def test_the_side_of_an_element_within_rounding_of_zero_is_no_failure(
    reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounding, "FURTHER_PARTS", ())
    with InprocEngine() as engine:
        result = prove(CASE, subject, engine, reference=reference)
    assert result.verdict == (PASS if reference.kinks else FAIL)


def test_a_gradient_that_is_twice_too_large_is_one() -> None:
    with InprocEngine() as engine:
        verdicts = {verdict.check: verdict for verdict in prove(CASE, doubled, engine).verdicts}
    assert verdicts["parameter_gradients"].verdict == FAIL
    assert "grad/layers.1.mlp.w1.weight" in verdicts["parameter_gradients"].message


def test_a_script_that_repeats_a_failure_is_made_of_a_real_one() -> None:
    with InprocEngine() as engine:
        assert shrunk(CASE, subject, engine) is None
