"""Communication: the ledger is the closed form, event by event; asynchronous calls are waited for and hidden."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from suites.prover import Prover


@given(data=st.data())
def test_ledger_is_the_closed_form(prover: Prover, mode: str, data: st.DataObject) -> None:
    prover.holds(prover.drawn(data, mode), "ledger", "groups")


@given(data=st.data())
def test_every_asynchronous_call_is_expected_hidden_and_waited_for(
    prover: Prover, mode: str, data: st.DataObject
) -> None:
    prover.holds(prover.drawn(data, mode, overlap=True), "ledger", "waits", "overlap")


@given(data=st.data())
def test_parallelism_happened(prover: Prover, mode: str, data: st.DataObject) -> None:
    prover.holds(prover.drawn(data, mode), "parallelism")
