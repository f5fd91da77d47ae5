"""Removing any single collective of `parallel` is noticed, and the failure names the module and the phase that lack it.

Every call site is found in the source and removed in turn (`removal`). Where a case reaches the site,
proving the case must fail and point at an event that the right subject issued and the mutant did not. A site that no
mode uses is held by the law of the pairs.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import pytest
import torch

from bugs.planting import planted_module
from harness.checking.evidence import FAIL
from harness.checking.ledger_checks import ledger
from harness.ledger import Event
from harness.running.ranks.execution import execute
from parallel.communication import collectives
from parallel.communication.mesh import Axis
from parallel.subject import subject
from reference.case import Case
from suites.session.prover import Prover
from tests.parallel.communication.test_pairs import broken_pairs
from tests.parallel.schemes.removal import CallSite, sites, source_without, without

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
        ("mode=tp dp=3 bucket=400", SMALL),
        ("mode=tp-sp dp=3 zero=1 bucket=400 steps=2", SMALL),
        ("mode=tp dp=4 zero=3 shard=2", SMALL),
        ("mode=tp dp=3 parity=1 recompute=full distribute_saved=true", SMALL),
        ("mode=tp dp=3 dtype=float16 master=float32 scaler=static loss_scale=4", SMALL),
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
RAW = collectives.all_reduce.__code__.co_filename


def _where(events: tuple[Event, ...]) -> Counter[tuple[str, str, str]]:
    return Counter((event.op, event.phase, event.region) for event in events if event.rank == 0)


@dataclass(frozen=True, kw_only=True)
class Right:
    """The right subject in one case: its ledger, and the (module, line, collective) that communicated on rank 0."""

    text: str
    events: tuple[Event, ...]
    reached: frozenset[tuple[str, int, str]]


@pytest.fixture(scope="module")
def right(prover: Prover, tmp_path_factory: pytest.TempPathFactory) -> list[Right]:
    """Every case, on the right subject."""
    saving = f"{SMALL} mode=tp dp=3 save={tmp_path_factory.mktemp('checkpoint')}"
    return [_ran(prover, text) for text in (*CASES, saving) if Case.parse(text).mode in subject.modes]


def _ran(prover: Prover, text: str) -> Right:
    reached: set[tuple[str, int, str]] = set()

    def profile(frame: FrameType, event: str, argument: object) -> None:
        axis = frame.f_locals.get("axis") if event == "call" and frame.f_code.co_filename == RAW else None
        if isinstance(axis, Axis) and axis.size > 1 and frame.f_back:
            reached.add((frame.f_back.f_globals["__name__"], frame.f_back.f_lineno, frame.f_code.co_name))

    def profiled(case: Case, device: torch.device) -> Mapping[str, Any]:
        sys.setprofile(profile)
        try:
            return subject(case, device)
        finally:
            sys.setprofile(None)

    events = execute(Case.parse(text), profiled, prover.engine, text=text).events
    return Right(text=text, events=events, reached=frozenset(reached))


EVERY = sites()
FEW = {(site.module, site.within): site for site in reversed(EVERY)}.values()
"""The first of each function."""


@pytest.mark.parametrize("site", EVERY, ids=str)
def test_a_removed_collective_is_named(
    prover: Prover, right: list[Right], site: CallSite, request: pytest.FixtureRequest
) -> None:
    if site not in FEW and request.config.getoption("hypothesis_profile", None) != "deep":
        pytest.skip("ten CPU seconds in all: --hypothesis-profile deep")
    place = (site.module, site.line, site.name)
    first = next((case for case in right if place in case.reached), None)
    if first is None:
        assert site.module == "parallel.communication.pairs", "a call that no case reaches is held by no check"
        assert broken_pairs(planted_module(source_without(site), "parallel.communication.pairs"), prover.engine)
        return
    result = prover.proof(Case.parse(first.text), without(site))
    assert result.verdict == FAIL
    if result.evidence is None:
        assert [verdict.check for verdict in result.verdicts] == ["run"]
        return
    lost = _where(first.events) - _where(result.evidence.events)
    finding = ledger(result.evidence)
    assert finding is not None
    assert (finding.phase, finding.region) in {(phase, region) for _, phase, region in lost}
    message = next(verdict.message for verdict in result.verdicts if verdict.check == "ledger")
    assert finding.phase in message
    assert finding.region in message
