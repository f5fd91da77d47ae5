"""Consistency: shards cover every tensor once, replicas agree and runs repeat to the bit, recording is unseen, and
asynchronous calls are waited for and hidden.
"""

from hypothesis import given, settings
from hypothesis import strategies as st

from shardproof.suites.session.prover import Prover

EXAMPLES = max(1, 3 * settings().max_examples // 8)
"""A case is run several times, so fewer are drawn."""


@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_replicas_agree_runs_repeat_and_asynchronous_calls_are_hidden(
    prover: Prover, mode: str, data: st.DataObject
) -> None:
    case = prover.draw_case(data, mode, steps=2, where_known={"overlap": True, "micro": 2})
    prover.holds(case, "merge", "replicas", "determinism", "recording", "waits", "overlap")
