"""One step: every module's output, the gradient in it, and every parameter's gradient are those of the dense model."""

from hypothesis import given, settings
from hypothesis import strategies as st

from shardproof.suites.session.prover import Prover

EXAMPLES = max(1, 3 * settings().max_examples // 8)
"""Fewer cases than the profile says, because test_training checks the parameters that these gradients give."""


@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_activations_and_gradients(prover: Prover, mode: str, data: st.DataObject) -> None:
    case = prover.draw_case(data, mode, steps=1)  # the outcome holds those of the first step
    prover.holds(case, "coverage", "merge", "activations", "activation_gradients", "parameter_gradients")
