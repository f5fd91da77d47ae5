"""What a closed form promises to hide is hidden, on every engine; a call that is awaited at once is named."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from harness.checking.checks import CHECKS
from harness.checking.evidence import FAIL, PASS
from harness.checking.ledger_checks import overlap
from harness.engines.named import engine_named
from harness.recording.measures import Overlap
from harness.running.proof import prove
from parallel.subject import subject
from reference.case import Case
from tests.harness.toy_evidence import TERMS, events, evidence

CASE = Case.parse("mode=tp-sp tp=2 layers=1 hidden=16 heads=2 seq=4")
ASKED = {name: CHECKS[name] for name in ("ledger", "waits", "overlap")}


class Exposed:
    """Ours without overlap, which promises the overlap of the case; the ledger is the same."""

    modes, refuses, expected = subject.modes, subject.refuses, subject.expected

    def __call__(self, case: Case, device: torch.device) -> Any:
        """Every call synchronous."""
        return subject(case.but(overlap=False), device)


exposed = Exposed()


@pytest.mark.parametrize("name", ["inproc", "pool", "dry"])
def test_calls_that_no_longer_overlap_fail_this_check_alone(name: str, request: pytest.FixtureRequest) -> None:
    with nullcontext(request.getfixturevalue("pool")) if name == "pool" else engine_named(name) as engine:
        right = prove(CASE, "parallel.subject:subject", engine, checks=ASKED)
        wrong = prove(CASE, "tests.harness.checking.test_overlap:exposed", engine, checks=ASKED)
    assert right.verdict == PASS and "overlap" in {verdict.check for verdict in right.verdicts}
    (failed,) = [verdict for verdict in wrong.verdicts if verdict.verdict == FAIL]
    assert failed.check == "overlap" and wrong.diagnosis is not None
    assert "in backward of head at parallel/" in failed.message
    assert [cause.id for cause in wrong.diagnosis.causes] == ["exposed"]


def test_as_many_calls_as_promised_must_be_hidden_on_every_rank() -> None:
    promised = (replace(TERMS[0], hidden=True), *TERMS[1:])
    mine = [event for event in events() if event.region == "embedding"]
    hidden = {(event.rank, event.call_index) for event in mine}

    def verdict(hidden: set[tuple[int, int]], **changes: Any) -> str:
        found = overlap(evidence(expectation=promised, hidden=frozenset(hidden), **changes))
        assert found is not None
        return found.verdict

    assert verdict(hidden) == PASS
    assert verdict(hidden - {(1, mine[-1].call_index)}) == FAIL
    left_out = tuple(event for event in events() if event.region != "embedding")
    assert verdict(set(), events=left_out) == PASS  # a missing call is the ledger's


def test_nothing_is_asked_without_a_promise_or_a_measurement() -> None:
    assert overlap(evidence(hidden=frozenset())) is None
    assert overlap(evidence(expectation=tuple(replace(term, hidden=True) for term in TERMS))) is None


def test_products_are_counted_on_the_ranks_thread_and_nothing_stays() -> None:
    call: Any = type("Call", (), {"is_async": True, "device": "cpu"})()
    a = torch.ones(3, 3, requires_grad=True)

    def hidden(compute: Any) -> bool:
        with Overlap() as watching, watching.on_rank(0):
            ticket = watching.issued(0, call)
            compute()
            watching.completed(0, ticket)
            a @ a
        return (0, ticket) in watching.hidden

    assert hidden(lambda: a @ a)
    assert hidden(lambda: torch.nn.functional.scaled_dot_product_attention(a[None], a[None], a[None]))
    assert not hidden(lambda: (a + a).relu().clone())
    total = (a @ a).sum()
    assert hidden(total.backward)  # the products of backward run in C++
    assert not torch._C._dispatch_has_kernel_for_dispatch_key("aten::mm", "BackendSelect")
