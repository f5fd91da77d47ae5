"""Subjects and an engine for the tests of the runner: right, wrong, raising, refusing ones.

They compute the dense model on every rank, so that only what a test plants is wrong; none of them communicates.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from shardproof.harness.engines.engine import Engine, RunRequest
from shardproof.harness.errors import MachineError, RankDied, RankRaised, TimeLimit
from shardproof.harness.ledger import Observer
from shardproof.reference.case import Case
from shardproof.reference.training import truth as dense


class LoopEngine(Engine):
    """Runs ranks one after another in this thread: an engine for programs that do not communicate."""

    name = "loop"
    remote = False

    def run_request(self, request: RunRequest, observer: Observer | None) -> list[Any]:
        """The results by rank; what a rank raises comes as the engines' errors do."""
        results = []
        for rank in range(request.world_size):
            torch.manual_seed(request.seed)
            try:
                results.append(request.program(rank, *request.args))
            except MachineError:
                raise
            except Exception as error:
                raise RankRaised(
                    f"rank {rank} raised {type(error).__name__}: {error}", ranks=(rank,), positions=()
                ) from error
        return results


def right(case: Case, device: torch.device) -> dict[str, Tensor]:
    """The dense model itself."""
    return dense.subject(case, device)


def wrong(case: Case, device: torch.device) -> dict[str, Tensor]:
    """Double one gradient."""
    outcome = dense.subject(case, device)
    outcome["grad/head.weight" if "grad/head.weight" in outcome else "grad/final_norm.weight"] *= 2
    return outcome


def in_set_order(case: Case, device: torch.device) -> dict[str, Tensor]:
    """The dense model, with losses that are summed from shares in the order of a set of strings."""
    outcome = dense.subject(case, device)
    shares = {f"share.{i}": i / 4950 for i in range(100)}
    for name in [name for name in outcome if name.startswith("loss/")]:
        loss = outcome[name]
        outcome[name] = sum((loss * shares[share] for share in set(shares)), torch.zeros_like(loss))
    return outcome


def losses_only(case: Case, device: torch.device) -> dict[str, Tensor]:
    """The least that can be checked."""
    return {name: value for name, value in dense.subject(case, device).items() if name.startswith("loss/")}


def empty(case: Case, device: torch.device) -> dict[str, Tensor]:
    """A subject that returns nothing that can be checked."""
    return {}


def raising(case: Case, device: torch.device) -> dict[str, Tensor]:
    """Fails on one seed only, so that other cases go on."""
    if case.seed == 13:
        raise ZeroDivisionError("thirteen")
    return dense.subject(case, device)


def dying(case: Case, device: torch.device) -> dict[str, Tensor]:
    """A machine that fails on some seeds."""
    if case.seed == 13:
        raise RankDied("rank 0 ended with status 9", ranks=(0,), positions=())
    if case.seed == 14:
        raise TimeLimit("no end after 1 s", ranks=(0,), positions=())
    return wrong(case, device) if case.seed == 15 else dense.subject(case, device)


class Stating:
    """The dense model, with attributes that a subject may have."""

    def __init__(self, **stated: object) -> None:
        vars(self).update(stated)

    def __call__(self, case: Case, device: torch.device) -> dict[str, Tensor]:
        """The dense model."""
        return dense.subject(case, device)


class Changed:
    """Another subject with all that it states, or more; `change(case, outcome)` is what it returns otherwise."""

    other: Any = None

    def __init__(self, other: Any, change: Callable[[Any, Any], Mapping[str, Any]] | None = None, **stated: Any):
        vars(self).update(other=other, change=change or (lambda case, outcome: {}), **stated)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.other, name)

    def __call__(self, case: Any, device: torch.device) -> Mapping[str, Any]:
        outcome = self.other(case, device)
        return {**outcome, **self.change(case, outcome)}


def _broken(case: Case) -> list[object]:
    """A closed form that raises."""
    raise KeyError("no such term")


limited, broken_expectation = Stating(modes=("tp-sp",)), Stating(expected=_broken)
refusing = Stating(refuses=lambda case: "odd seeds bring bad luck" if case.seed % 2 else "")
