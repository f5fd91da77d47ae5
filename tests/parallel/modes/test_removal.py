"""Removing any single collective of `parallel` is noticed, and the failure names the module and the phase that lack it.

Every call site is found in the source and removed in turn (`suites.mutants.removal`). Where a case reaches the site,
proving the case must fail and point at an event that the right subject issued and the mutant did not. A site that no
mode uses is held by the law of the pairs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from harness.checking.evidence import FAIL
from harness.checking.ledger_checks import ledger
from harness.errors import ProgramError
from harness.ledger import Event
from harness.running.execution import execute
from parallel.subject import subject
from reference.case import Case
from suites.mutants.planting import planted_module
from suites.mutants.removal import CallSite, sites, source_without, without
from suites.prover import Prover
from tests.parallel.pair_laws import broken_pairs

SMALL = "layers=1 heads=4 kv_heads=4 hidden=16 ffn=16 seq=8 steps=1 micro=1 tp=2"
EVO = f"preset=tiny-internlm2 {SMALL} vocab=264"
CASES = tuple(
    f"{sizes} {words}"
    for words, sizes in (
        ("mode=tp dp=3 qk_norm=true label_smoothing=0.1", SMALL),
        ("mode=tp cross_entropy=fused delivery=flat head=gather", SMALL),
        ("mode=tp cross_entropy=fused", SMALL),
        ("mode=tp-sp dp=3", SMALL),
        ("mode=tp-sp positions=rope", SMALL),
        ("mode=mtp metric=true", EVO),
        ("mode=msp embedding=hidden head=gather", EVO),
        ("mode=isp metric=true head=local overlap=false", EVO),
        ("mode=isp dp=3 bias=true overlap=false", EVO),
        ("mode=isp embedding=vocab head=gather qk_norm=true", EVO),
        ("mode=isp head=local overlap=true", EVO),
        ("mode=isp fuse_weights=true", EVO),
    )
)
"""Cases that reach the sites between them; the first that reaches a site proves it."""


def _where(events: tuple[Event, ...]) -> Counter[tuple[str, str, str]]:
    return Counter((event.op, event.phase, event.region) for event in events if event.rank == 0)


@pytest.fixture(scope="module")
def right(prover: Prover) -> dict[str, tuple[Event, ...]]:
    """Case text -> the ledger of the right subject."""
    texts = [text for text in CASES if Case.parse(text).mode in subject.modes]
    return {text: execute(Case.parse(text), subject, prover.engine, text=text).events for text in texts}


def _lacking(
    prover: Prover, mutant: Callable[..., Any], right: dict[str, tuple[Event, ...]]
) -> Iterator[tuple[str, Counter[tuple[str, str, str]]]]:
    """Case text -> events that the mutant does not issue there, for the cases that reach the removed call.

    None are known of a mutant that crashes for want of the call.
    """
    for text, events in right.items():
        try:
            found = execute(Case.parse(text), mutant, prover.engine, text=text).events
        except ProgramError:
            yield text, Counter()
            continue
        if lost := _where(events) - _where(found):
            yield text, lost


@pytest.mark.parametrize("site", sites(), ids=str)
def test_a_removed_collective_is_named(prover: Prover, right: dict[str, tuple[Event, ...]], site: CallSite) -> None:
    mutant = without(site)
    reached = next(_lacking(prover, mutant, right), None)
    if reached is None:
        assert site.module == "parallel.pairs", "a call that no case reaches is held by no check"
        assert broken_pairs(planted_module(source_without(site), "parallel.pairs"), prover.engine)
        return
    text, lost = reached
    result = prover.proof(Case.parse(text), mutant)
    assert result.verdict == FAIL
    if not lost:
        assert [verdict.check for verdict in result.verdicts] == ["run"]
        return
    assert result.evidence is not None
    finding = ledger(result.evidence)
    assert finding is not None
    assert (finding.phase, finding.region) in {(phase, region) for _, phase, region in lost}
    message = next(verdict.message for verdict in result.verdicts if verdict.check == "ledger")
    assert finding.phase in message
    assert finding.region in message
