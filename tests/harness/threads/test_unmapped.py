"""Operators of torch that shardproof does not know: recorded by their schemas, and unknown where they are issued.

They are registered when this module is imported. `c10d::shardproof_swap_` has a kernel, which adds up over the group;
`c10d::shardproof_void_` has none.
"""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardproof.harness.engines.threads.dry import DryEngine
from shardproof.harness.engines.threads.inproc import InprocEngine
from shardproof.harness.ledger import OTHER
from shardproof.harness.running.proof import prove
from shardproof.harness.verdicts.verdict import PASS, UNKNOWN
from shardproof.parallel.subject import subject as right
from shardproof.reference.case import Case
from tests.harness.engines.programs import Log
from tests.harness.proofs import verdict_of
from tests.harness.recording.toy_calls import recorded

SWAP, VOID = "shardproof_swap_", "shardproof_void_"
_ARGUMENTS = "Tensor[] tensors, Tensor other, __torch__.torch.classes.c10d.ProcessGroup process_group"
_library = torch.library.Library("c10d", "FRAGMENT")
for _name in (SWAP, VOID):
    _library.define(f"{_name}({_ARGUMENTS}, bool async_op=True) -> Tensor[]")


def _swap(tensors: list[Tensor], other: Tensor, group: Any, async_op: bool = True) -> list[Tensor]:
    options = dist.AllreduceOptions()
    options.asyncOp = False
    dist.ProcessGroup.unbox(group).allreduce(tensors, options).wait()
    return tensors


_library.impl(SWAP, _swap, "CompositeExplicitAutograd")


def swaps(rank: int, name: str = SWAP) -> float:
    """The sum over the ranks of rank + 1, by the operator: 3 doubles and 2 more beside them go to it."""
    group: Any = dist.group.WORLD
    mine = torch.full((3,), rank + 1.0, dtype=torch.float64)
    getattr(torch.ops.c10d, name)([mine], torch.zeros(2, dtype=torch.float64), group.boxed(), False)
    return float(mine[0])


class _Issuing:
    """Our subject, which issues the operator too in mode mtp."""

    modes = right.modes

    def __init__(self, name: str) -> None:
        self._name = name

    def expected(self, case: Any) -> Any:
        return right.expected(case)

    def __call__(self, case: Any, device: torch.device) -> Mapping[str, Any]:
        if case.mode == "mtp" and device.type != "meta":
            swaps(dist.get_rank(), self._name)
        return right(case, device)


swapping, voiding = _Issuing(SWAP), _Issuing(VOID)
_CASES = [Case.parse(f"mode={mode} tp=2 layers=1 micro=1 steps=1") for mode in ("mtp", "tp")]


def test_the_schema_tells_group_and_payload(engine: InprocEngine) -> None:
    kept = Log()
    assert engine.run(swaps, world_size=2, observer=kept) == [3.0, 3.0]
    for rank in range(2):
        other, inner = kept.of(rank)
        assert (other.op, other.operator, other.group, other.dtype) == (OTHER, f"c10d::{SWAP}", (0, 1), "float64")
        assert (other.shapes, other.payload_bytes, other.is_async) == (((3,), (2,)), (3 + 2) * 8, False)
        assert (inner.op, inner.operator, inner.payload_bytes) == ("all_reduce", "", 3 * 8)
    assert sorted(ticket for _, ticket in kept.completions) == [0, 1, 2, 3]


@pytest.mark.parametrize("name", ["engine", "pool"])
def test_only_the_case_that_issues_it_is_unknown_and_names_it(name: str, request: pytest.FixtureRequest) -> None:
    one, other = (prove(case, swapping, engine=request.getfixturevalue(name)) for case in _CASES)
    ledger = verdict_of(one, "ledger")
    assert ledger.verdict == UNKNOWN and f"c10d::{SWAP}" in ledger.message and "test_unmapped.py" in ledger.message
    numbers = {verdict.check: verdict.verdict for verdict in one.verdicts if verdict.check != "ledger"}
    assert set(numbers.values()) == {PASS} and one.verdict == UNKNOWN
    assert other.verdict == PASS


def test_an_operator_without_a_kernel_is_unknown_by_name_and_the_next_case_runs(engine: InprocEngine) -> None:
    one, other = (prove(case, voiding, engine=engine) for case in _CASES)
    run = verdict_of(one, "run")
    assert run.verdict == UNKNOWN and not one.machine
    assert f"c10d::{VOID}" in run.message and "legal: --engine pool" in run.message
    assert other.verdict == PASS


def test_a_dry_rank_records_it() -> None:
    events = recorded(swaps, 2, {"tp": ((0, 1),)}, engine=DryEngine())
    assert [(event.op, event.axis, event.payload_bytes, event.operator) for event in events] == [
        (OTHER, "tp", 40, f"c10d::{SWAP}"),
        ("all_reduce", "tp", 24, ""),
    ] * 2


def gathers(rank: int) -> list[float]:
    """gather_single to rank 1 as torch 2.14 calls it, by the method of the group."""
    group, options = dist.group.WORLD, dist.GatherOptions()
    options.rootRank, options.asyncOp = 1, False
    mine, whole = torch.full((2, 2), rank + 1.0), torch.zeros(4 if rank == 1 else 0, 2)
    if hasattr(dist, "gather_single"):
        dist.gather_single(mine, whole if rank == 1 else None, dst=1)
    else:
        group.gather_single(whole, mine, options)  # type: ignore[union-attr]
    return whole.flatten().tolist()


def test_a_gather_into_one_tensor_is_a_gather(engine: InprocEngine) -> None:
    kept = Log()
    assert engine.run(gathers, world_size=2, observer=kept) == [[], [1.0] * 4 + [2.0] * 4]
    for rank in range(2):
        assert [(call.op, call.peer, call.payload_bytes) for call in kept.of(rank)] == [("gather", 1, 16)]
