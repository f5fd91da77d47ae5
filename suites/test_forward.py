"""Forward: losses, logits and every module's output are those of the dense model."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from suites.prover import Prover
from suites.strategies import cases


@given(data=st.data())
def test_losses_and_logits(prover: Prover, mode: str, data: st.DataObject) -> None:
    prover.holds(data.draw(cases(mode, prover.worlds)), "coverage", "merge", "forward")


@given(data=st.data())
def test_activations(prover: Prover, mode: str, data: st.DataObject) -> None:
    prover.holds(data.draw(cases(mode, prover.worlds)), "merge", "activations")
