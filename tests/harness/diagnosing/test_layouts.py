"""A flaw of dtype or shape has a cause that fits it, and what cannot be compared disturbs no diagnosis."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from harness.checking.checks import examine
from harness.checking.evidence import Evidence
from harness.diagnosing.diagnosis import Diagnosis, diagnose
from harness.outcome.blocks import localize
from harness.outcome.merging import differing, merge
from harness.shard import Shard
from tests.harness.toy_evidence import evidence, outcome_of, truth

NAME = "grad/layers.0.mlp.w2.bias"
W1 = "grad/layers.0.mlp.w1.weight"


def diagnosed(seen: Evidence, check: str) -> Diagnosis:
    findings = examine(seen)
    assert findings[check].verdict == "fail"
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of complex numbers taken for real ones
        return diagnose(seen, findings, check)


def returned(name: str, *values: object) -> Evidence:
    return evidence(*({**outcome_of(rank, truth()), name: value} for rank, value in enumerate(values)))


def told(seen: Evidence, check: str = "merge") -> tuple[str, str]:
    (cause,) = diagnosed(seen, check).causes
    return cause.id, cause.words


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda t: t.long(), "whole numbers where fractions belong: "),
        (lambda t: t > 0, "truth values where numbers belong: "),
        (lambda t: t.to(torch.complex128), "complex numbers where real ones belong: "),
    ],
    ids=("int", "bool", "complex"),
)
def test_another_kind_of_number_is_told_as_such(wrong: Callable[[Tensor], Tensor], words: str) -> None:
    value = wrong(truth()[NAME])
    known, said = told(returned(NAME, value, value))
    assert known == "other_dtype" and said.startswith(words)


def test_ranks_that_return_other_dtypes_are_told_as_such() -> None:
    value = truth()[NAME]
    known, said = told(returned(NAME, value, value.float()))
    assert (known, said) == (
        "other_dtype",
        "a cast, or a promotion with another tensor, on some ranks and not on others",
    )


@pytest.mark.parametrize(
    ("wrong", "known", "words"),
    [
        (lambda t: t[:4], "part_as_whole", "1 of 2 parts along dim 0 (tp) told as the whole: return Shard(local, "),
        (lambda t: t[:, :3], "part_as_whole", "1 of 2 parts along dim 1 (tp) told as the whole: return Shard(local, "),
        (lambda t: t[:5], "other_shape", "rows or columns that are missing: "),
        (lambda t: torch.cat((t, t)), "other_shape", "rows or columns too many: "),
        (lambda t: t.T, "other_shape", "its dims in another order: "),
        (lambda t: t[None], "other_shape", "a dim too many or too few: "),
        (lambda t: t.flatten(), "other_shape", "a dim too many or too few: "),
    ],
    ids=("part", "columns", "cut", "padded", "transposed", "more", "flat"),
)
def test_another_full_shape_is_told_by_what_it_looks_like(
    wrong: Callable[[Tensor], Tensor], known: str, words: str
) -> None:
    value = wrong(truth()[W1])
    assert told(returned(W1, value, value))[0] == known
    assert told(returned(W1, value, value))[1].startswith(words)


def test_ranks_that_tell_other_full_shapes_are_told_as_such() -> None:
    full = truth()[W1]
    parts: list[Any] = [Shard(full[:5], (0, 0), (8, 6)), Shard(full[5:], (4, 0), (7, 6))]
    known, said = told(returned(W1, *parts))
    assert known == "other_shape" and said.startswith("a global_shape that ranks compute from what each holds: ")


def test_offsets_are_still_the_cause_of_shards_that_overlap() -> None:
    full = truth()[W1]
    parts: list[Any] = [Shard(full[:4], (0, 0), (8, 6)), Shard(full[3:7], (3, 0), (8, 6))]
    assert told(returned(W1, *parts))[0] == "layout"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_replicas_of_which_one_is_no_number_are_told_so(bad: float) -> None:
    value = truth()[NAME].clone()
    value[2] = bad
    known, said = told(returned(NAME, truth()[NAME], value), "replicas")
    words = "on rank 1 it is NaN or infinite: uninitialised memory, an overflow or a division by zero"
    assert (known, said) == ("nan", words)


def test_complex_replicas_that_differ_have_a_diagnosis() -> None:
    value = truth()[NAME].to(torch.complex128)
    assert diagnosed(returned(NAME, value, value * 1j), "replicas").name == NAME


def test_what_is_no_number_is_counted_apart() -> None:
    one = torch.tensor([1.0, 2.0, 3.0, torch.inf])
    assert differing(torch.tensor([torch.nan, 2.5, 3.0, torch.inf]), one) == (
        "in 2 of 4 elements, NaN or infinite in 1, by up to 0.5, first at (0,)"
    )
    assert differing(torch.tensor(torch.nan), torch.tensor(1.0)) == "in 1 of 1 elements, NaN or infinite in 1"


def test_a_full_shape_larger_than_any_memory_is_an_omission() -> None:
    (flaw,) = merge([localize({"w": Shard(torch.ones(4), (0,), (10**15,))})]).flaws
    assert (flaw.kind, flaw.message) == (
        "omission",
        "999999999999996 of 1000000000000000 elements are held by no rank; first missing at (4,)",
    )


@given(st.data())
def test_the_first_element_that_is_missing_is_found_as_among_all_elements(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    full = torch.zeros(shape)
    cells = [tuple(int(i) for i in place) for place in torch.ones(shape).nonzero()]
    kept = data.draw(st.sets(st.sampled_from(cells), min_size=1, max_size=len(cells)))
    shards = [Shard(torch.ones([1] * len(shape)), place, shape) for place in sorted(kept)]
    flaws = merge([localize({"w": shards})]).flaws
    for place in kept:
        full[place] = 1
    missing = [tuple(int(i) for i in place) for place in (full == 0).nonzero()]
    assert [flaw.message.rpartition(" at ")[2] for flaw in flaws] == [str(place) for place in missing[:1]]
