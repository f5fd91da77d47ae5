"""The timeline in text: the one in the docs, and what its marks mean."""

from __future__ import annotations

from parallel.schedules.pipeline import Pipeline
from parallel.schedules.timing import ComputeTimes
from tests import ROOT
from tests.parallel.schedules.picture import picture


def test_the_picture_of_the_docs_is_what_the_function_returns() -> None:
    text = (ROOT / "docs" / "schedules.md").read_text()
    assert f"```\n{picture(Pipeline(schedule='1f1b', ranks=4, micro=6))}\n```" in text


def test_a_chunk_is_marked_and_waiting_is_dots() -> None:
    assert picture(Pipeline(schedule="interleaved", ranks=2, micro=2, chunks=2)).splitlines() == [
        "rank 0 |F0   F1   F0'1 F1'1 .    .    B0'1 =    .    B1'1 =    B0   =    B1   =",
        "rank 1 |.    F0   F1   F0'1 B0'1 =    F1'1 B1'1 =    B0   =    B1   =",
        "bubble 1/5, closed form 1/5",
    ]


def test_unequal_times_have_their_columns() -> None:
    drawn = picture(Pipeline(schedule="zb-h1", ranks=2, micro=2), ComputeTimes(forward=2, input=2, weight=1))
    assert drawn.splitlines() == [
        "rank 0 |F0 -  F1 -  .  .  B0 =  W0 .  B1 =  W1",
        "rank 1 |.  .  F0 -  B0 =  F1 -  B1 =  W0 W1",
        "bubble 3/13, closed form 3/13",
    ]
