"""A subject that issues an operator of c10d which shardproof does not know, registered when this module is imported.

`c10d::shardproof_swap_` has a kernel, which adds up over the group; `c10d::shardproof_void_` has none.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.subject import subject as right

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
        """Our closed form."""
        return right.expected(case)

    def __call__(self, case: Any, device: torch.device) -> Mapping[str, Any]:
        """Our outcome."""
        if case.mode == "mtp" and device.type != "meta":
            swaps(dist.get_rank(), self._name)
        return right(case, device)


swapping, voiding = _Issuing(SWAP), _Issuing(VOID)
