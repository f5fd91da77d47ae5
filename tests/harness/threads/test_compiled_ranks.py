"""DDP under torch.compile on ranks that are threads: compiled as in a process, with the ledger of plain code."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shardproof.harness.ledger import REPEATABLE
from shardproof.harness.running.result import CaseResult
from shardproof.suites.subjects import compiled
from tests.deep import deep
from tests.harness.proofs import proved, told


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class TwoLayers(nn.Module):
    """Two layers with a relu between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x_BD: Tensor) -> Tensor:
        y_BD: Tensor = self.second(torch.relu(self.first(x_BD)))
        return y_BD


class Trained:
    """Data-parallel training of two layers, in the way that `wrapped` returns."""

    words, cases = {"micro": 1}, ("dp=2",)

    def __init__(self, wrapped: Callable[[nn.Module], Any], truth: Any = None) -> None:
        self._wrapped, self.truth = wrapped, truth or self.dense

    @staticmethod
    def _rows(case: Any, micro: int, data_rank: int) -> Tensor:
        numbers = case.samples(0, micro, data_rank, 3)
        rows = [torch.randn(4, generator=torch.Generator().manual_seed(n), dtype=torch.float64) for n in numbers]
        return torch.stack(rows)

    def dense(self, case: Any, device: torch.device) -> dict[str, Any]:
        """All samples at once, layer by layer: another code than that which ranks compile."""
        torch.manual_seed(case.seed)
        model = TwoLayers().double()
        places = [(micro, data_rank) for micro in range(case.micro) for data_rank in range(case.dp)]
        rows_BD = torch.cat([self._rows(case, *place) for place in places])
        loss = model.second(torch.relu(model.first(rows_BD))).square().mean()
        loss.backward()
        return _outcome(loss.detach(), model)

    def __call__(self, case: Any, device: torch.device) -> dict[str, Any]:
        torch.manual_seed(case.seed)
        model, total = TwoLayers().double(), torch.zeros((), dtype=torch.float64)
        wrapped = self._wrapped(model)
        for micro in range(case.micro):
            loss = wrapped(self._rows(case, micro, dist.get_rank())).square().mean() / case.micro
            loss.backward()
            total += loss.detach() / case.dp
        dist.all_reduce(total)
        return _outcome(total, model)


def _outcome(loss: Tensor, model: TwoLayers) -> dict[str, Any]:
    return {"loss/0": loss, "grad/first": model.first.weight.grad, "grad/second": model.second.weight.grad}


def calls(result: CaseResult) -> list[tuple[Any, ...]]:
    """The ledger without the columns that differ from run to run."""
    assert result.verdict == "pass", told(result)
    return [tuple(getattr(event, column) for column in REPEATABLE) for event in result.events]


class Count:
    """A compiler that changes nothing and counts its graphs."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, _inputs: object) -> Callable[..., Any]:
        self.graphs += 1
        return graph.forward


@pytest.mark.parametrize("truth", [None, "alone"])
def test_compiled_data_parallel_training_has_the_calls_of_plain_training(
    truth: str | None, caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    """Of the truth alone too, which is the first to run the code, under a mode: nothing of it is compiled there."""
    count = Count()
    plain = calls(proved(Trained(DistributedDataParallel, truth), "dp=2"))
    with caplog.at_level(logging.WARNING):
        outer = Trained(lambda model: torch.compile(DistributedDataParallel(model), backend=count), truth)
        assert calls(proved(outer, "dp=2")) == plain
        inner = Trained(
            lambda model: DistributedDataParallel(torch.compile(model, backend=count, fullgraph=True)), truth
        )
        assert calls(proved(inner, "dp=3")) == calls(proved(Trained(DistributedDataParallel, truth), "dp=3"))
    assert count.graphs >= 2
    assert not [record for record in caplog.records if "recompile_limit" in record.getMessage()]
    assert not [str(warning.message) for warning in recwarn if "harness" in str(warning.message)]


@pytest.mark.parametrize(
    "case", ["dp=2 data=fsdp2 steps=1", *deep("ten CPU seconds", "tp=2 dp=2 steps=1", "dp=3 data=fsdp2")]
)
def test_a_compiled_tutorial_has_the_ledger_of_plain_code(case: str, recwarn: pytest.WarningsRecorder) -> None:
    plain, other = (calls(proved(compiled.subject, case + more)) for more in ("", " compile=aot_eager"))
    assert [call[1:] for call in other] == [call[1:] for call in plain], "but for the text of the case"
    assert not [str(warning.message) for warning in recwarn if "shardproof" in str(warning.message)]


def test_many_ranks_and_runs_compile_a_function_each_for_themselves(caplog: pytest.LogCaptureFixture) -> None:
    """A graph that holds a group is none of another rank's; torch gives up after eight of one function."""
    count = Count()

    def summed(x_BD: Tensor) -> Tensor:
        total = x_BD.sum()
        dist.all_reduce(total)
        return total

    def subject(case: Any, device: torch.device) -> dict[str, Any]:
        return {"loss/0": torch.compile(summed, backend=count, fullgraph=True)(torch.ones(2, 2)) / case.world_size}

    subject.truth = lambda case, device: {"loss/0": torch.tensor(4.0)}  # type: ignore[attr-defined]
    with caplog.at_level(logging.WARNING):
        result = proved(subject, "dp=6")
    assert result.verdict == "pass", told(result)
    assert count.graphs > 8
    assert not [record for record in caplog.records if "recompile_limit" in record.getMessage()]
