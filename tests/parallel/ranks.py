"""Ranks for the tests of `parallel`: programs on in-process ranks, and the calls that they issue."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from shardproof.harness.engines.threads.inproc import InprocEngine
from shardproof.harness.ledger import Call
from shardproof.harness.outcome.blocks import localize
from shardproof.harness.outcome.merging import merge_outcomes
from shardproof.parallel.communication.expectation import CompleteTerm
from shardproof.parallel.communication.layout import Axis, Mesh
from shardproof.parallel.model.strategy import Step, Value
from shardproof.parallel.subject import strategy_of, subject
from shardproof.parallel.training import train
from shardproof.reference.case import Case

CPU = torch.device("cpu")


class Calls:
    """An observer that keeps every call by rank."""

    def __init__(self) -> None:
        self.by_rank: dict[int, list[Call]] = {}

    def on_issue(self, rank: int, call: Call) -> int:
        self.by_rank.setdefault(rank, []).append(call)
        return 0

    def on_completion(self, rank: int, ticket: int) -> None:
        """Nothing to note."""

    def ops(self, rank: int = 0) -> list[str]:
        """The ops of one rank in order."""
        return [call.op for call in self.by_rank.get(rank, [])]


def on_ranks(world_size: int, program: Callable[..., Any], *args: Any, observer: Calls | None = None) -> list[Any]:
    """The results of `program(rank, *args)` by rank."""
    with InprocEngine() as engine:
        return engine.run(program, *args, world_size=world_size, observer=observer)


@dataclass(frozen=True, kw_only=True)
class Otherwise:
    """Our training with another step, held to the same closed form: a schedule or shards of another library."""

    step: Callable[[Case, Step], Step]
    takes: Callable[[Case], bool]
    legal: str

    def __call__(self, case: Case, device: torch.device) -> dict[str, Value]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # those of the library
            return train(case, replace(strategy_of(case), step=self.step), Mesh.of(case), device)

    def refuses(self, case: Case) -> str:
        return "" if self.takes(case) else self.legal

    def expected(self, case: Case) -> Iterable[CompleteTerm]:
        return subject.expected(case)


def stated(
    case: Case, *fields: str, where: Callable[[CompleteTerm], bool] = lambda _: True, each: str = "calls"
) -> Counter[Any]:
    """Calls that our closed form states, by these fields of a term, all of them a tuple; or their bytes."""
    found = Counter[Any]()
    for term in subject.expected(case):
        if where(term):
            found[attrgetter(*fields)(term)] += term.calls * (term.payload_bytes if each == "bytes" else 1)
    return found


def outcome(text: str) -> dict[str, Tensor]:
    """The tensors of a case on our ranks, put together; no two ranks disagree on one."""
    case = Case.parse(text)
    merged = merge_outcomes(on_ranks(case.world_size, lambda _: localize(subject(case, CPU))))
    assert merged.flaws == ()
    return dict(merged.tensors)


def along_tp(world_size: int, program: Callable[[Axis], Any], *, observer: Calls | None = None) -> list[Any]:
    """The results of `program(axis)` by rank, on an axis tp that spans the world."""
    case = Case.of(tp=world_size, heads=world_size, kv_heads=world_size, hidden=2 * world_size, ffn=world_size)
    return on_ranks(world_size, lambda rank: program(Mesh.of(case).axis("tp")), observer=observer)


def group(ranks: int = 1, rank: int = 0) -> Any:
    """A process group of which only the size and this rank are known."""
    return SimpleNamespace(size=lambda: ranks, rank=lambda: rank)


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Distinct numbers without symmetry."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
