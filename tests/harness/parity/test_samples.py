"""Samples of two launches: rows find each other by their bits, and what is read twice, or by nobody, is named."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shardproof.harness.parity.axes import axes_of
from shardproof.harness.parity.recorded import Launch, read_launch
from shardproof.harness.parity.samples import check_samples, describe_difference, describe_own_order, samples_of
from shardproof.harness.programs.values import ValueRow, append_values
from shardproof.harness.verdicts.verdict import FAIL, PASS

pytest.importorskip("safetensors", reason="needs safetensors")

TOKENS = torch.randint(0, 50, (4, 8), generator=torch.Generator().manual_seed(1))
Given = Sequence[Mapping[str, Tensor]]
"""The arguments of one rank's outermost module, micro-batch by micro-batch."""


def recorded(folder: Path, ranks: Sequence[Given]) -> Launch:
    folder.mkdir()
    for rank, calls in enumerate(ranks):
        rows, tensors = [], {}
        for call, given in enumerate(calls):
            for name, tensor in given.items():
                key = f"{call}/{name}"
                dtype = str(tensor.dtype).removeprefix("torch.")
                row = ValueRow(
                    kind="sample", step=0, name=name, call=call, key=key, dtype=dtype, shape=(*tensor.shape,)
                )
                rows.append(row)
                tensors[key] = tensor.contiguous()
        append_values(folder, rank, 0, rows, tensors)
    return read_launch(folder)


def rows(*numbers: int) -> Given:
    return [{"args/0": TOKENS[[*numbers]]}]


def slices(*parts: int) -> Given:
    return [{"args/0": torch.cat([TOKENS.chunk(4, 1)[part] for part in parts], 1)}]


LENGTHS = (3, 8, 5, 6)


def padded(*numbers: int, left: bool = False) -> Given:
    """Rows of these lengths as a collator pads them, to the longest of a batch."""
    width = max(LENGTHS[number] for number in numbers)
    tokens, mask = torch.full((len(numbers), width), 99), torch.zeros(len(numbers), width, dtype=torch.int64)
    for row, number in enumerate(numbers):
        place = slice(width - LENGTHS[number], None) if left else slice(LENGTHS[number])
        tokens[row, place], mask[row, place] = TOKENS[number, : LENGTHS[number]], 1
    return [{"words/input_ids": tokens, "words/attention_mask": mask}]


RIGHT: Mapping[str, tuple[Sequence[Given], Mapping[str, tuple[tuple[int, ...], ...]]]] = {
    "data ranks": ([rows(0, 2), rows(1, 3)], {"dp": ((0, 1),)}),
    "ranks of one model": ([rows(0, 1, 2, 3)] * 2, {"tp": ((0, 1),)}),
    "both": ([rows(0, 1), rows(0, 1), rows(2, 3), rows(2, 3)], {"tp": ((0, 1), (2, 3)), "dp": ((0, 2), (1, 3))}),
    "both, data ranks next to each other": (
        [rows(0, 1), rows(2, 3), rows(0, 1), rows(2, 3)],
        {"tp": ((0, 2), (1, 3)), "dp": ((0, 1), (2, 3))},
    ),
    "micro-batches": ([[*rows(3), *rows(0)], [*rows(1), *rows(2)]], {"dp": ((0, 1),)}),
    "slices of sequences": ([slices(0, 1), slices(2, 3)], {"cp": ((0, 1),)}),
    "slices in zigzag": ([slices(0, 3), slices(1, 2)], {"cp": ((0, 1),)}),
}


@pytest.mark.parametrize("layout", RIGHT)
def test_ranks_that_read_every_sample_once_are_right(layout: str, tmp_path: Path) -> None:
    ranks, axes = RIGHT[layout]
    second = recorded(tmp_path / "b", ranks)
    found = samples_of(recorded(tmp_path / "a", [rows(0, 1, 2, 3)]), second, 0)
    assert describe_difference(found) is None and check_samples([found]).verdict == "pass"
    assert dict(axes_of(second, found)) == axes


WRONG: Mapping[str, tuple[Sequence[Given], str]] = {
    "a row twice": (
        [rows(0, 2), rows(2, 3)],
        "step 0: 1 of launch A's 4 samples is read by no rank, e.g. row 1 of micro-batch 0; "
        "1 is read more than once, e.g. row 2 of micro-batch 0, by ranks 0 1",
    ),
    "half a batch": (
        [rows(0), rows(1)],
        "step 0: 2 of launch A's 4 samples are read by no rank, e.g. row 2 of micro-batch 0",
    ),
    "other rows": (
        [[{"args/0": TOKENS + 1}]],
        "step 0: 4 of launch A's 4 samples are read by no rank, e.g. row 0 of micro-batch 0; "
        "4 are read that launch A does not have in this step, e.g. row 0 of micro-batch 0 on rank 0",
    ),
    "a slice twice": (
        [slices(0, 1), slices(1, 2)],
        "step 0: 4 of launch A's 4 samples are read by no rank, e.g. row 0 of micro-batch 0; "
        "4 are read more than once, e.g. row 0 of micro-batch 0, by ranks 0 1",
    ),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_what_is_missing_twice_or_foreign_is_said(mistake: str, tmp_path: Path) -> None:
    ranks, words = WRONG[mistake]
    found = samples_of(recorded(tmp_path / "a", [rows(0, 1, 2, 3)]), recorded(tmp_path / "b", ranks), 0)
    how = describe_difference(found)
    assert how is not None and how.text == words
    assert check_samples([found]).verdict == "fail"


def test_ranks_that_alone_read_rows_of_no_step_are_named(tmp_path: Path) -> None:
    first = recorded(tmp_path / "a", [rows(0, 1, 2, 3)])
    for number, (foreign, words) in enumerate(
        {
            (): "",
            (1,): "rank 1 alone reads rows that launch A does not have in this step, rank 0 none, as where every rank "
            "shuffles with a seed of its own",
            (0, 1): "",
        }.items()
    ):
        ranks = [[{"args/0": TOKENS[own] + (rank in foreign)}] for rank, own in enumerate(([0, 2], [1, 3]))]
        how = describe_own_order(samples_of(first, recorded(tmp_path / str(number), ranks), 0))
        assert (how.text if how else "") == words


def test_samples_that_cannot_be_held_against_each_other_are_unknown(tmp_path: Path) -> None:
    second = recorded(tmp_path / "b", [[{"args/0": torch.randn(4, 3, 3)}]])
    found = check_samples([samples_of(recorded(tmp_path / "a", [rows(0, 1)]), second, 0)])
    assert found.verdict == "unknown" and "args/0 (4, 3, 3)" in found.message


def test_rows_that_are_equal_accuse_nobody(tmp_path: Path) -> None:
    first = recorded(tmp_path / "a", [rows(0, 0, 1, 2)])
    for number, ranks in enumerate(([rows(0, 1), rows(0, 2)], [rows(0, 0), rows(1, 2)])):
        assert describe_difference(samples_of(first, recorded(tmp_path / str(number), ranks), 0)) is None
    lacking = samples_of(first, recorded(tmp_path / "c", [rows(0, 1), rows(2, 2)]), 0)
    how = describe_difference(lacking)
    assert how is not None and "1 of launch A's 4 samples is read by no rank, e.g. row 0" in how.text


@pytest.mark.parametrize("left", [False, True])
def test_rows_that_are_padded_to_the_longest_of_their_batch_find_each_other(left: bool, tmp_path: Path) -> None:
    first = recorded(tmp_path / "a", [padded(0, 1, 2, 3, left=left)])
    right = recorded(tmp_path / "b", [padded(0, 2, left=left), padded(1, 3, left=left)])
    assert check_samples([samples_of(first, right, 0)]).verdict == "pass"
    wrong = recorded(tmp_path / "c", [padded(0, 2, left=left), padded(0, 3, left=left)])
    assert check_samples([samples_of(first, wrong, 0)]).verdict != "pass"


def test_a_head_that_is_called_by_itself_receives_no_samples(tmp_path: Path) -> None:
    """torchtitan's model leaves its head to the loss, which calls it for one part of the tokens after the other."""

    def headed(*numbers: int, error: float) -> Given:
        hidden = [{"head:args/0": TOKENS[[*numbers], part : part + 2] / 7 + error} for part in (0, 2, 4, 6)]
        return [{**rows(*numbers)[0], **hidden[0]}, *hidden[1:]]

    first = recorded(tmp_path / "first", [headed(0, 1, 2, 3, error=0.0)])
    second = recorded(tmp_path / "second", [headed(2, 0, error=1e-15), headed(1, 3, error=1e-15)])
    assert check_samples([samples_of(first, second, 0)]).verdict == PASS
    wrong = recorded(tmp_path / "wrong", [headed(2, 0, error=1e-15), headed(1, 1, error=1e-15)])
    assert check_samples([samples_of(first, wrong, 0)]).verdict == FAIL
