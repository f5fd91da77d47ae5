"""The matcher by itself: what is not known is no difference, and who parted how in whole sequences."""

import pytest

from shardproof.harness.engines.calls.matching import Divergence, GroupCall, RankCalls, compare_calls, find_divergences
from shardproof.harness.engines.calls.signature import NOT_KNOWN, Signature

TP = ("tp", (0, 1, 2), "")


def call(op: str = "all_reduce", dtype: str = NOT_KNOWN, size: int | None = None, place: str = "") -> GroupCall:
    signature = Signature(op, NOT_KNOWN, NOT_KNOWN, NOT_KNOWN, dtype, NOT_KNOWN)
    return GroupCall(signature, ("forward", place, 0, 0), "tp", size_bytes=size)


@pytest.mark.parametrize(
    ("calls", "told"),
    [
        ((call(), call(dtype="float32"), call(size=8)), ""),
        (
            (call(dtype="int32"), call(), call(dtype="float32")),
            "the dtype is float32 on rank 2, int32 on rank 0, not known on rank 1; ",
        ),
        ((call(size=8), call(size=8), call(size=4)), "the payload is 4 B on rank 2, 8 B on ranks 0 1; "),
        ((call("barrier", "int32"), call(), call()), "the op is barrier on rank 0, all_reduce on ranks 1 2; "),
    ],
)
def test_what_is_not_known_of_a_call_is_no_difference(calls: tuple[GroupCall, ...], told: str) -> None:
    found = compare_calls(TP, 7, dict(enumerate(calls)))
    assert (found is None) == (not told)
    if found is not None:
        assert found.text.startswith(f"ranks disagree in call #7 of tp (0 1 2): {told}")


def test_of_many_values_the_first_are_listed() -> None:
    found = compare_calls(TP, 0, {rank: call(size=rank) for rank in range(1000)})
    assert found is not None and len(found.text) < 500 and "7 B on rank 7, and 992 values more; rank 1" in found.text


def found_in(*ranks: list[GroupCall], whole: bool) -> list[Divergence]:
    """Numbers begin at 0."""
    known = [
        RankCalls(rank=rank, calls={TP: dict(enumerate(own))}, last={TP: len(own) - 1}, ended="ended", whole=whole)
        for rank, own in enumerate(ranks)
    ]
    return find_divergences(known, first=0)


def test_a_call_at_another_place_is_none_that_a_rank_skipped_once_all_calls_are_known() -> None:
    own = [call(place=str(number)) for number in range(4)]
    late = [*own[1:], call("barrier")]
    assert [(one.how, one.ranks, one.number) for one in found_in(own, own, own[1:], whole=True)] == [
        ("skipped", (2,), 0)
    ]
    assert [(one.how, one.ranks) for one in found_in(own, own, [own[0], *own], whole=True)] == [("extra", (2,))]
    first = [call("barrier"), *own[1:]]
    assert [one.how for one in found_in(first, first, late, whole=False)] == ["skipped"], "as far as the dumps reach"
    assert [(one.how, one.ranks) for one in found_in(first, first, late, whole=True)] == [("differs", (2,))]
    assert found_in(own, own, own, whole=True) == []


def test_a_rank_that_issued_nothing_lacks_the_first_call_where_all_is_known_of_it() -> None:
    (found,) = found_in([call()], [call()], [], whole=True)
    assert found.text == "rank 2 never issued call #0 of tp (0 1 2): all_reduce over tp (forward, step 0)"
