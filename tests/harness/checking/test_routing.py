"""Maps of experts that any subject returns: copies on several ranks must be equal, whether its truth has maps or not.

A planted difference is one token that one rank sends elsewhere.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardproof.harness.checking.routing_checks import balance_of_rows
from shardproof.harness.protocols import Shard
from shardproof.harness.verdicts.verdict import FAIL, PASS, UNKNOWN
from shardproof.reports.commands.cli import main
from tests.harness.noted import reasons_of
from tests.harness.proofs import proved

NAME = "routing/0/layers.0.mlp"
SENT = [[0, 1], [0, 2], [1, 3], [0, 3], [2, 3], [0, 2]]
"""The experts of six tokens, of four: three to rank 0's data, three to the next."""
TABLE = "tests.harness.checking.test_routing:subject"


def whole() -> Tensor:
    """[2 rows, 3 tokens, 4 experts]."""
    chosen = torch.zeros(6, 4, dtype=torch.int32)
    for token, experts in enumerate(SENT):
        chosen[token, experts] = 1
    return chosen.view(2, 3, 4)


class Routed:
    """Returns maps, a row on each data rank, copies on its tensor ranks; the rank `planted` sends a token elsewhere."""

    words: Mapping[str, Any] = {"planted": -1, "micro": 1}
    cases = ("tp=2 dp=2",)

    def __init__(self, *, truth_has_maps: bool = False) -> None:
        self.truth_has_maps = truth_has_maps

    def __call__(self, case: Any, device: torch.device) -> Mapping[str, Tensor | Shard]:
        rank = dist.get_rank()
        row = rank // case.tp if case.dp > 1 else 0
        mine = whole()[row : row + 1] if case.dp > 1 else whole()
        if rank == case.planted:
            mine[0, 1] = mine[0, 1].roll(1)
        dist.all_reduce(torch.ones(1))
        return {"loss/0": torch.tensor(1.0), NAME: Shard(mine, (row, 0, 0), (2, 3, 4))}

    def truth(self, _case: Any, _device: torch.device) -> Mapping[str, Tensor]:
        """The loss, and maps where it has them."""
        return {"loss/0": torch.tensor(1.0), **({NAME: whole()} if self.truth_has_maps else {})}


subject = Routed()


def found(words: str, tried: Routed = subject) -> Mapping[str, Any]:
    return {verdict.check: verdict for verdict in proved(tried, words).verdicts}


@pytest.mark.parametrize(("rank", "has_maps"), [(1, False), (2, True), (3, False)])
def test_a_copy_that_differs_is_told_with_rank_and_token(rank: int, has_maps: bool) -> None:
    """By hand: ranks 0 and 1 have the first row, 2 and 3 the second; of two copies the second one is named."""
    verdicts = found(f"tp=2 dp=2 planted={rank}", Routed(truth_has_maps=has_maps))
    assert {check for check, verdict in verdicts.items() if verdict.verdict == FAIL} == {"routing"}
    one, other = (1, 0) if rank == 1 else (3, 2)
    message = verdicts["routing"].message
    assert f"rank {one} sends 1 of 3 tokens to other experts: the first, (0, 1), to " in message
    assert f"rank {one} parts from rank {other}, which holds the same tokens (check routing)" in message
    moved, right = {1: ("1 3", "0 2"), 2: ("2 3", "0 3"), 3: ("0 3", "2 3")}[rank]
    assert f"to {moved}, on rank {other} to {right};" in message


def test_equal_copies_pass_and_tell_the_busiest_expert() -> None:
    """Four of twelve rows go to expert 0, of a mean of three. Without copies and a truth's maps nothing is claimed."""
    for has_maps in (False, True):
        verdicts = found("tp=2 dp=2", Routed(truth_has_maps=has_maps))
        assert {verdict.verdict for verdict in verdicts.values()} == {PASS}
        assert "busiest: expert 0 of 0/layers.0.mlp, 1.33 times the mean" in verdicts["routing"].message
        assert any("the truth has no maps" in one for one in reasons_of(verdicts["routing"])) is not has_maps
    assert found("tp=1 dp=2")["routing"].verdict == UNKNOWN
    assert found("tp=1 dp=2", Routed(truth_has_maps=True))["routing"].verdict == PASS
    wrong = found("tp=1 dp=2 planted=1", Routed(truth_has_maps=True))["routing"]
    assert wrong.verdict == FAIL, "no copy of it, but the truth knows"


def test_page_and_show_have_the_rows_of_every_expert(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "tp=2 dp=2", "--subject", TABLE, "--out", str(tmp_path)]) == 0
    assert main(["show", str(tmp_path / "latest")]) == 0
    assert balance_of_rows(torch.zeros(4, dtype=torch.int64)) == 1, "without any row"
    told = capsys.readouterr().out
    assert "Rows of experts" in told and "4 2 3 3" in told and "1.33" in told
    page = (tmp_path / "latest" / "report.html").read_text("utf-8")
    assert "Rows of experts" in page and "4 2 3 3" in page
