"""Backward: the gradient in every module's output and of every parameter is the dense model's."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from suites.prover import Prover


@given(data=st.data())
def test_activation_gradients(prover: Prover, mode: str, data: st.DataObject) -> None:
    prover.holds(prover.drawn(data, mode), "merge", "activation_gradients")


@given(data=st.data())
def test_parameter_gradients(prover: Prover, mode: str, data: st.DataObject) -> None:
    prover.holds(prover.drawn(data, mode), "merge", "parameter_gradients")
