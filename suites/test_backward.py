"""Backward: the gradient in every module's output and of every parameter is the dense model's."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from suites.prover import Prover
from suites.strategies import cases


@given(data=st.data())
def test_activation_gradients(prover: Prover, mode: str, data: st.DataObject) -> None:
    prover.holds(data.draw(cases(mode, prover.worlds)), "merge", "activation_gradients")


@given(data=st.data())
def test_parameter_gradients(prover: Prover, mode: str, data: st.DataObject) -> None:
    prover.holds(data.draw(cases(mode, prover.worlds)), "merge", "parameter_gradients")
