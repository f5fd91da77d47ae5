"""The table in every mode's docstring, its closed form, and the calls that ranks issue: three accounts that agree."""

from __future__ import annotations

import importlib
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.registry import MODES
from parallel.subject import subject
from reference.case import Case
from suites.drawing.strategies import cases
from tests.parallel.ranks import CPU, MEGATRON, Calls, on_ranks
from tests.parallel.schemes.mode_tables import Line, promised, rows


def _docstring(mode: str) -> str:
    module = importlib.import_module(f"parallel.schemes.{mode.replace('-', '_')}")
    assert module.__doc__
    return module.__doc__


def _expected(case: Case) -> Counter[Line]:
    found: Counter[Line] = Counter()
    for term in subject.expected(case):
        if term.phase != "data":
            found[(term.phase, term.region, term.op, term.axis, term.payload_bytes)] += term.calls
    return found


@pytest.mark.parametrize("megatron", MEGATRON)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_the_table_promises_what_the_closed_form_expects(megatron: str, data: st.DataObject) -> None:
    case = data.draw(cases(megatron, label_smoothing=0.0, head=data.draw(st.sampled_from(("parallel", "gather")))))
    assert promised(_docstring(megatron), case, MODES[megatron]) == _expected(case)


@pytest.mark.parametrize("megatron", MEGATRON)
def test_every_row_of_a_table_is_used(megatron: str) -> None:
    """A row that no case meets would promise nothing."""
    words = "tp=2 dp=3 heads=4 kv_heads=2 hidden=16 ffn=16 qk_norm=true"
    forms = [
        f"{words} head=gather",
        f"{words} positions=rope cross_entropy=fused",
        f"{words} fuse_mlp=true activation=swiglu",
    ]
    for row in rows(_docstring(megatron)):
        table = "tensor|layout|forward|backward|bytes\n" + "|".join(
            (
                " ".join((row.tensor, *row.conditions)),
                "",
                ",".join(row.forward) or "-",
                ",".join(row.backward) or "-",
                row.bytes,
            )
        )
        seen = [promised(table, Case.parse(f"mode={megatron} {form}"), MODES[megatron]) for form in forms]
        assert any(seen) or not (row.forward or row.backward), row


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
