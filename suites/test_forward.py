"""Forward: data, token counts, losses and logits of every step are those of the dense model."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from suites.session.prover import Prover


@given(data=st.data())
def test_losses_and_logits(prover: Prover, mode: str, data: st.DataObject) -> None:
    case = prover.drawn(data, mode, steps=2)  # the second shows what the first has changed
    prover.holds(case, "data", "merge", "tokens", "forward")
