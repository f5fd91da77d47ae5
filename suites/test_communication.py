"""Communication: the ledger is the closed form, event by event, and the work was shared."""

from hypothesis import given, settings
from hypothesis import strategies as st

from shardproof.suites.session.prover import Prover

EXAMPLES = max(1, settings().max_examples // 4)
"""A quarter of the cases of the profile, because test_training checks the same in all of them."""


@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_the_ledger_is_the_closed_form_and_parallelism_happened(prover: Prover, mode: str, data: st.DataObject) -> None:
    prover.holds(prover.draw_case(data, mode, steps=2), "ledger", "groups", "parallelism")
