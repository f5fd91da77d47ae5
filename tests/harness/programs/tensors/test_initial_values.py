"""The initial weights of another recording where groups of ranks leave open which part a rank holds."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from shardproof.harness.programs.tensors import initial_values
from shardproof.harness.programs.tensors.initial_values import NAMES, NO_CUT, InitialValues
from shardproof.harness.programs.tensors.layouts import split_value
from shardproof.harness.programs.tensors.names import ModulePath, NamedParameter
from shardproof.harness.programs.values import write_about
from tests.harness.parity.toy_launches import Rank

pytest.importorskip("safetensors", reason="needs safetensors")

FULL = torch.arange(24.0).reshape(4, 6)


@pytest.fixture
def truth(tmp_path: Path) -> Path:
    """A recording of one rank with a parameter `w`."""
    folder = tmp_path / "truth"
    rank = Rank(0)
    rank.add("param", 0, "w", FULL)
    folder.mkdir()
    rank.write(folder, 1)
    return folder


def given(folder: Path, drawn: Tensor, parts_of: str = "") -> tuple[Tensor, InitialValues]:
    values = InitialValues(str(folder), parts_of)
    tensor = drawn.clone()
    values.overwrite([NamedParameter(place=ModulePath("w", "w"), tensor=tensor, split=split_value)])
    return tensor, values


def test_of_two_groups_of_one_size_the_one_whose_ranks_drew_other_parts_cuts(
    truth: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = {rank: FULL[:2] + rank % 2 for rank in range(4)}  # 0 and 2 hold one part, 1 and 3 the other
    earlier = tmp_path / "earlier"
    earlier.mkdir()
    for rank, tensor in drawn.items():
        groups = [(rank // 2 * 2, rank // 2 * 2 + 1), (rank % 2, rank % 2 + 2)]
        monkeypatch.setattr(initial_values, "own_groups", lambda size, groups=groups: groups if size == 2 else [])
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        kept, values = given(truth, tensor)
        if rank in (1, 2):  # it stands at 0 in one of its groups, at 1 in the other
            assert values.lacking["w"].startswith(NO_CUT) and torch.equal(kept, tensor)
        own = Rank(rank)
        own.add("param", 0, "w", tensor)
        own.write(earlier, 4)
        write_about(earlier, rank, {"world_size": 4, "steps": [0], "drawn_parts": values.drawn})
    (earlier / NAMES).write_text("{}")
    for rank, tensor in drawn.items():
        groups = [(rank // 2 * 2, rank // 2 * 2 + 1), (rank % 2, rank % 2 + 2)]
        monkeypatch.setattr(initial_values, "own_groups", lambda size, groups=groups: groups if size == 2 else [])
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        kept, values = given(truth, tensor, str(earlier))
        assert not values.lacking and torch.equal(kept, FULL.chunk(2)[rank % 2])


def test_a_parameter_gets_the_value_of_the_name_that_an_earlier_recording_gives_it(truth: Path, tmp_path: Path) -> None:
    (tmp_path / "earlier").mkdir()
    Rank(0).write(tmp_path / "earlier", 1)
    (tmp_path / "earlier" / "values" / "rank-0.jsonl").touch()
    values = InitialValues(str(truth), str(tmp_path / "earlier"))
    (tmp_path / "earlier" / NAMES).write_text('{"0": {"v": "w"}, "1": {"v": "u"}}')
    tensor = torch.zeros(4, 6)
    values.overwrite([NamedParameter(place=ModulePath("v", "v"), tensor=tensor, split=split_value)])
    assert torch.equal(tensor, FULL) and values.lacking == {} and values.drawn == {}, "zeros are drawn by many"
