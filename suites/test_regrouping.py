"""Regrouping: the same global batch gives the same step, split over data and context ranks, stages, micro-batches."""

from typing import Any

import hypothesis
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardproof.harness.running.trials.law_runs import groupings, most_exact
from shardproof.harness.subject import own_cases
from shardproof.reference.language.core import MODES
from shardproof.suites.session.prover import Prover

EXAMPLES = max(1, settings().max_examples // 4)
"""An example runs up to three groupings, so fewer are drawn."""


@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_the_same_batch_gives_the_same_step(prover: Prover, mode: str, data: st.DataObject) -> None:
    own = own_cases(prover.subject)
    exact: dict[str, Any] = {} if own and all(most_exact(one, prover.subject) for one in own) else {"dtype": "float64"}
    row = 48 if mode in MODES and MODES[mode].sequence else 8  # two context ranks cut it, whatever tp is drawn
    divided = {"layers": 2, "seq": row} if data.draw(st.booleans(), label="context ranks and stages") else {}
    case = prover.draw_case(data, mode, where_known=divided, steps=1, **exact)
    if not hasattr(case, "dp"):
        pytest.skip(f"cases of {prover.subject.name} have no data axis (no word dp)")
    if own is not None and not any(getattr(one, "dp", 1) > 1 for one in own):
        pytest.skip(f"no case that {prover.subject.name} names has data ranks (dp > 1)")
    if not groupings(case, prover.subject):
        hypothesis.reject()
    prover.holds(case, "merge", "regrouping")
