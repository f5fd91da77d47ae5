"""Communication: the ledger is the closed form, event by event; asynchronous calls are waited for and hidden."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from suites.prover import Prover


@given(data=st.data())
def test_the_ledger_is_the_closed_form_and_parallelism_happened(prover: Prover, mode: str, data: st.DataObject) -> None:
    prover.holds(prover.drawn(data, mode), "ledger", "groups", "parallelism")


@given(data=st.data())
def test_every_asynchronous_call_is_expected_hidden_and_waited_for(
    prover: Prover, mode: str, data: st.DataObject
) -> None:
    prover.holds(prover.drawn(data, mode, steps=2, where_known={"overlap": True}), "ledger", "waits", "overlap")
