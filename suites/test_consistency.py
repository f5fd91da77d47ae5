"""Consistency: shards cover every tensor once, replicas agree and runs repeat to the bit, recording is unseen."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from suites.prover import Prover


@given(data=st.data())
def test_replicas_agree_runs_repeat_and_recording_changes_nothing(
    prover: Prover, mode: str, data: st.DataObject
) -> None:
    prover.holds(prover.drawn(data, mode, steps=2), "merge", "replicas", "determinism", "recording")
