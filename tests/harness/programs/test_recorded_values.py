"""Values of a training script recorded as it is: what every rank held is there, by name and place, and changes nothing.

Truth is the same script on one rank: the parts that ranks recorded, put together, are its tensors. Every script trains
in float64, so that sums in another order differ by 1e-12.
"""

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from shardproof.harness.programs.values import RankValues, ValueRow, read_values
from tests.harness.programs.launched import LIMIT_S, forked

SCRIPT = Path(__file__).with_name("valued.py")
PARALLEL = ("ddp", "fsdp1", "fsdp1-flat", "fsdp2", "tp")
Recorded = tuple[tuple[RankValues, ...], list[str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("values")
    shutil.copy(SCRIPT, made / "valued.py")
    return made


def recorded(folder: Path, kind: str, *words: str, script: str = "valued.py") -> Recorded:
    """What all ranks recorded, and what they printed."""
    world = 2 if kind in PARALLEL else 1
    place = folder / "-".join([kind, *words]).replace("/", "_")[:99]
    place.mkdir()
    shutil.copy(folder / script, place)
    ranks = forked(place, script, kind, world=world, record=["--values", *words])
    assert [rank.ended(LIMIT_S) for rank in ranks] == [0] * world, ranks[0].err
    assert not any("no more values" in rank.err for rank in ranks), ranks[0].err
    return read_values(place / "runs" / "latest"), [rank.out for rank in ranks]


def rows(ranks: Sequence[RankValues], kind: str, name: str, step: int = 0) -> Iterator[tuple[RankValues, ValueRow]]:
    for rank in ranks:
        for row in rank.rows:
            if (row.kind, row.name, row.step) == (kind, name, step):
                yield rank, row


def whole(ranks: Sequence[RankValues], kind: str, name: str, leaf: str = "", step: int = 0) -> torch.Tensor:
    """The full tensor of the parts that say where they lie, or the one that all ranks have."""
    found = [(rank.tensor(row), row) for rank, row in rows(ranks, kind, name, step) if row.leaf == leaf]
    first, row = found[0]
    if row.global_shape is None:
        assert all(torch.equal(first, other) for other, _row in found)
        return first
    full = torch.full(row.global_shape, torch.nan, dtype=first.dtype)
    for tensor, row in found:
        assert row.offsets is not None
        full[tuple(slice(o, o + n) for o, n in zip(row.offsets, tensor.shape, strict=True))] = tensor
    return full


@pytest.mark.parametrize("kind", ["plain", "frozen", "checkpoint", "reentrant", "criterion", "closure", *PARALLEL])
def test_a_program_prints_the_same_with_its_values_recorded(folder: Path, kind: str) -> None:
    world = 2 if kind in PARALLEL else 1
    plain = forked(folder, "valued.py", kind, world=world)
    values, out = recorded(folder, kind)
    assert [rank.ended(LIMIT_S) for rank in plain] == [0] * world, plain[0].err
    assert [rank.out for rank in plain] == out
    assert [rank.about["steps"] for rank in values] == [[0, 1]] * world
    assert all(rank.about["done"] and rank.about["world_size"] == world for rank in values)
