"""What the recorder sees of the whole subject, phases and regions told from outside: exactly the closed form.

Also: nothing asynchronous is left unwaited. Drawn cases: `suites/test_communication.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from harness.differences import Difference, differences
from harness.engines.threads.inproc import InprocEngine
from harness.ledger import Event
from harness.recording.recorder import Recorder
from parallel.communication.expectation import CompleteTerm
from parallel.subject import subject
from reference.case import Case
from reference.model.parameters import shapes
from tests.parallel.ranks import CPU, MEGATRON


def _recorded(case: Case, run: Callable[..., Any] = subject) -> tuple[Event, ...]:
    """Every event of every rank; asserts that every asynchronous call was waited for."""
    recorder = Recorder(str(case), case.mode, case.world_size, case.axes)

    def program(rank: int) -> None:
        with recorder.on_rank(rank):
            run(case, CPU)

    with recorder, InprocEngine() as engine:
        engine.run(program, world_size=case.world_size, observer=recorder)
        assert engine.unwaited == ()
    return tuple(recorder.events())


def _parted(case: Case, events: Iterable[Event]) -> list[Difference]:
    terms: Iterable[CompleteTerm] = subject.expected(case)
    holders = [name.rpartition(".")[0] for name in shapes(case)]
    order = ["embedding", *dict.fromkeys(holder for holder in holders if not holder.startswith("embedding.")), "head"]
    return differences(events, terms, range(case.world_size), order)


@pytest.mark.parametrize("megatron", MEGATRON)
@pytest.mark.parametrize("words", ["", "positions=rope", "activation=swiglu positions=rope"])
def test_the_ledger_is_the_closed_form(megatron: str, words: str) -> None:
    case = Case.parse(f"mode={megatron} tp=4 kv_heads=4 batch=3 micro=3 steps=3 dtype=float64 {words}")
    events = _recorded(case)
    assert _parted(case, events) == []
    layers, micro = case.layers, case.steps * case.micro
    found = {(e.phase, e.op): 0 for e in events}
    for event in events:
        found[event.phase, event.op] += event.rank == 0
    columns = layers * (3 if "swiglu" in words else 2)
    if megatron == "tp":
        assert found["forward", "all_reduce"] == (2 * layers + 1) * micro
        assert found["backward", "all_reduce"] == (columns + 1) * micro
    else:
        assert found["forward", "all_gather"] == (columns + 1) * micro
        assert found["backward", "all_gather"] == (columns + 2 * layers + 2) * micro
        assert found["backward", "reduce_scatter"] == (columns + 1) * micro
    assert found["loss", "all_reduce"] == 3 * micro


@pytest.mark.parametrize("words", ["tp=1", "tp=1 dp=2", "tp=2 dp=3 delivery=flat qk_norm=true", "tp=2 delivery=local"])
@pytest.mark.parametrize("megatron", MEGATRON)
def test_few_ranks_and_every_delivery_have_their_closed_form(megatron: str, words: str) -> None:
    case = Case.parse(f"mode={megatron} layers=1 {words}")
    assert _parted(case, _recorded(case)) == []
