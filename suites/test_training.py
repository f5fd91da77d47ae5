"""Training: parameters after k steps are the dense model's; SGD shows factors that Adam hides (bugs.md, section 3)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from suites.session.prover import Prover


@given(data=st.data())
def test_sgd(prover: Prover, mode: str, data: st.DataObject) -> None:
    """With a clip that binds, one that does not, and none."""
    clip, lr = data.draw(st.sampled_from(((0.05, 1.0), (0.0, 1.0), (1000.0, 0.1))), label="clip and lr")
    words = {"lr": lr, "optimizer": "sgd", "clip": clip}
    case = prover.drawn(data, mode, where_known=words)  # without these words: the subject's own optimizer
    prover.holds(case, "merge", "update", "gradient_norm")


@given(data=st.data())
def test_adamw(prover: Prover, mode: str, data: st.DataObject) -> None:
    case = prover.drawn(data, mode, optimizer="adamw", lr=0.01)
    prover.holds(case, "merge", "update", "gradient_norm")
