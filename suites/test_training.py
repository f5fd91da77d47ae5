"""Training: parameters after k steps are the dense model's; SGD shows factors that Adam hides (bugs.md, section 3)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from suites.prover import Prover


@given(data=st.data())
def test_sgd_without_clipping(prover: Prover, mode: str, data: st.DataObject) -> None:
    case = prover.drawn(data, mode, lr=1.0, optimizer="sgd", clip=0.0)
    prover.holds(case, "merge", "update", "gradient_norm")


@given(data=st.data())
def test_clipping_that_binds(prover: Prover, mode: str, data: st.DataObject) -> None:
    case = prover.drawn(data, mode, lr=1.0, optimizer="sgd", clip=0.05)
    prover.holds(case, "merge", "update", "gradient_norm")


@given(data=st.data())
def test_clipping_that_does_not_bind(prover: Prover, mode: str, data: st.DataObject) -> None:
    case = prover.drawn(data, mode, lr=0.1, optimizer="sgd", clip=1000.0)
    prover.holds(case, "merge", "update", "gradient_norm")


@given(data=st.data())
def test_adamw(prover: Prover, mode: str, data: st.DataObject) -> None:
    case = prover.drawn(data, mode, optimizer="adamw", lr=0.01)
    prover.holds(case, "merge", "update", "gradient_norm")
