"""The table in every mode's docstring, its closed form, and the calls that ranks issue: three accounts that agree."""

from __future__ import annotations

from collections import Counter

import pytest

from parallel.subject import subject
from reference.case import Case
from tests.parallel.ranks import CPU, Calls, on_ranks


@pytest.mark.parametrize(
    "words",
    [
        "mode=tp tp=3 dp=2 heads=6 kv_heads=3 hidden=12 ffn=12 seq=6 recompute=full qk_norm=true",
        "mode=tp-sp tp=3 dp=2 heads=6 kv_heads=3 hidden=12 ffn=12 seq=6 recompute=full activation=swiglu",
        "mode=tp-sp tp=2 positions=rope head=gather fuse_qkv=false delivery=flat",
        "mode=tp tp=2 label_smoothing=0.1 cross_entropy=fused dtype=bfloat16 delivery=local",
        "mode=tp-sp tp=1 dp=2",
        "mode=tp tp=1",
    ],
)
def test_ranks_issue_what_the_closed_form_expects(words: str) -> None:
    """Phases and regions are the recorder's business; op, reduce op, group size, dtype and bytes are held here."""
    case, calls = Case.parse(f"layers=2 steps=2 {words}"), Calls()
    on_ranks(case.world_size, lambda rank: subject(case, CPU), observer=calls)
    expected: Counter[tuple[str, str, int, str, int]] = Counter()
    for term in subject.expected(case):
        expected[(term.op, term.reduce_op, term.group_size, term.dtype, term.payload_bytes)] += term.calls
    for rank in range(case.world_size):
        assert calls.lines(rank) == expected
