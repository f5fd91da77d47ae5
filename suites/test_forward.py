"""Forward: data, token counts, losses and logits of every step are those of the dense model."""

from hypothesis import given, settings
from hypothesis import strategies as st

from shardproof.suites.session.prover import Prover

EXAMPLES = max(1, settings().max_examples // 4)
"""A quarter of the cases of the profile, because test_training checks the same in all of them."""


@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_losses_and_logits(prover: Prover, mode: str, data: st.DataObject) -> None:
    case = prover.draw_case(data, mode, steps=2)  # the second shows what the first has changed
    prover.holds(case, "merge", "tokens", "forward")
