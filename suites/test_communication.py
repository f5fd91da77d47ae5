"""Communication: the ledger is the closed form, event by event; every asynchronous call is waited for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from suites.prover import Prover
from suites.strategies import cases


@given(data=st.data())
def test_ledger_is_the_closed_form(prover: Prover, mode: str, data: st.DataObject) -> None:
    prover.holds(data.draw(cases(mode, prover.worlds)), "ledger")


@given(data=st.data())
def test_every_asynchronous_call_is_expected_and_waited_for(prover: Prover, mode: str, data: st.DataObject) -> None:
    prover.holds(data.draw(cases(mode, prover.worlds, overlap=True)), "ledger", "waits")


@given(data=st.data())
def test_parallelism_happened(prover: Prover, mode: str, data: st.DataObject) -> None:
    prover.holds(data.draw(cases(mode, prover.worlds)), "parallelism")
