"""When the ranks of a pipeline compute, recorded on real processes: the schedule's order, on one clock."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from harness.engines.processes.forked.pool import PoolEngine
from harness.engines.threads.inproc import InprocEngine
from harness.recording.spans import RankSpan
from harness.running.ranks.execution import execute
from parallel.pipeline.prediction import CasePipeline
from parallel.subject import subject
from reference.case import Case

SIZES = "tp=1 pp=2 heads=2 hidden=8 ffn=12 vocab=20 seq=8 steps=2"
CASES = (
    f"mode=tp {SIZES} layers=3 first_layers=2 micro=3",
    f"mode=tp-sp {SIZES} layers=4 micro=3 schedule=interleaved chunks=2 group=3 cp=2",
)
COMPUTED = ("F", "B")


def wrong(case: Case, spans: tuple[RankSpan, ...]) -> list[str]:
    """What contradicts the programs of the case's stages: computations, their order, or what they had to wait for."""
    found = []
    at = {rank: place for group in case.axes["pp"] for place, rank in enumerate(group)}
    programs = CasePipeline(case=case).programs
    for rank, place in at.items():
        own = [span for span in spans if span.rank == rank and span.kind in COMPUTED]
        order = [(a.kind, a.micro, a.chunk) for step in programs[place] for a in step if a.kind.computes]
        if [(span.kind, span.micro, span.chunk) for span in own] != order * case.steps:
            found.append(f"rank {rank} computes in another order")
        if any(one.end_us > next_.start_us for one, next_ in pairwise(own)):
            found.append(f"rank {rank} computes twice at once")
        if [span.step for span in own] != sorted(step for step in range(case.steps) for _ in order):
            found.append(f"rank {rank} is in another step")
    for group in case.axes["pp"]:
        ends = {(s.step, s.kind, s.micro, s.chunk * case.pp + at[s.rank]): s for s in spans if s.rank in group}
        for (step, kind, micro, stage), span in ends.items():
            before = ends.get((step, kind, micro, stage + (1 if kind == "B" else -1)))
            if kind in COMPUTED and before is not None and span.start_us < before.end_us:
                found.append(f"{kind}{micro} of stage {stage} begins before its input is there")
    return found


@pytest.mark.parametrize("words", CASES)
def test_ranks_compute_in_the_order_of_the_schedule_and_after_their_inputs(words: str, pool: PoolEngine) -> None:
    case = Case.parse(words)
    spans = execute(case, subject, pool, text=words).spans
    assert wrong(case, spans) == []
    calls = [span for span in spans if span.kind not in COMPUTED]
    assert {span.kind for span in calls} >= {"send", "recv"}
    assert all(span.start_us <= span.end_us for span in spans)
    early = [replace(span, start_us=0.0) if span.kind == "B" else span for span in spans]
    swapped = [replace(span, micro=(span.micro + 1) % case.micro) if span.kind == "F" else span for span in spans]
    assert wrong(case, tuple(early)) and wrong(case, tuple(swapped))


def test_ranks_that_take_turns_have_no_picture() -> None:
    case = Case.parse(CASES[0])
    with InprocEngine() as engine:
        run = execute(case, subject, engine, text="")
    assert run.events and run.spans == ()
