"""Mode equivalence: a mode whose result is another by a billionth is noticed."""

from __future__ import annotations

from bugs.planting import planted, replaced
from harness.outcome.merging import merge
from harness.running.ranks.execution import execute
from parallel.subject import subject
from reference.case import Case
from suites.session.prover import Prover
from suites.test_equivalence import apart


def test_a_mode_that_computes_something_else_is_noticed(prover: Prover) -> None:
    case = Case.parse("mode=tp tp=2 layers=1 heads=4 hidden=16 ffn=24 seq=8 vocab=264 steps=1")
    wrong = planted(
        replaced("parallel.layers.linear", "grad_x = reduced.wait()", "grad_x = reduced.wait() * (1 + 1e-9)")
    )
    runs = [execute(case, run, prover.engine, text=str(case)) for run in (subject, wrong)]
    right, other = (dict(merge(run.outcomes).tensors) for run in runs)
    assert apart(right, right) == []
    assert "grad/layers.0.mlp.w1.weight" in apart(right, other)
