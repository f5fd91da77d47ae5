"""Outputs of a rank in a disturbed collective in place of the right values: new tensors, made from copies.

The kinds are those of `harness.faults`. To be called inside `unseen()`.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardproof.harness.engines.calls import arithmetic
from shardproof.harness.engines.calls.arithmetic import Combine, Operands
from shardproof.harness.engines.calls.signature import Signature
from shardproof.harness.faults import Fault
from shardproof.harness.torch_internals.autograd import unversioned
from shardproof.harness.torch_internals.modes import unseen


class CompletedCall(NamedTuple):
    """A call that is complete, by group rank: copies of the operands (outputs as they were before), and the outputs,
    which hold the right values. Of a message there is the receiver alone.
    """

    signature: Signature
    combine: Combine
    kept: Sequence[Operands]
    outputs: Sequence[Sequence[Tensor]]


def wrong(what: Fault, done: CompletedCall) -> list[Sequence[Tensor]]:
    """By group rank, what a fault of this kind leaves; not for group and stale, which depend on other calls."""
    if what.kind in {"drop", "delay"}:
        alone, size = _ALONE.get(done.combine, lambda mine, _member, _size: list(mine.outputs)), len(done.kept)
        return [alone(mine, member, size) for member, mine in enumerate(done.kept)]
    if what.kind == "poison":
        return [[poison(tensor) for tensor in outputs] for outputs in done.outputs]
    if what.kind == "op":
        return _made_again([copied(mine) for mine in done.kept], done, what.change)
    return _doubled(done)


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """New tensors with the same numbers and strides."""
    return [tensor.clone() for tensor in tensors]


def copied(brought: Operands) -> Operands:
    """Operands of a rank in tensors of its own; outputs that are inputs stay so."""
    outputs = copies(brought.outputs)
    inputs = outputs if brought.inputs is brought.outputs else copies(brought.inputs)
    return brought._replace(outputs=outputs, inputs=inputs)


def overwrite(outputs: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Write values of the same sizes; autograd does not count it as another change of the tensors."""
    with unseen(), unversioned(tuple(outputs)):
        for output, value in zip(outputs, values, strict=True):
            output.copy_(value.reshape(output.shape))


def poison(tensor: Tensor) -> Tensor:
    """A value that cannot be mistaken for a result."""
    if tensor.dtype is torch.bool:
        return ~tensor
    if tensor.is_floating_point() or tensor.is_complex():
        return torch.full_like(tensor, float("nan"))
    return torch.full_like(tensor, torch.iinfo(tensor.dtype).max)


def _doubled(done: CompletedCall) -> list[Sequence[Tensor]]:
    """Outputs by rank: the call made again on its result; where shapes forbid that, a reduced result counts twice."""
    in_place, exchanges = done.combine in _IN_PLACE, done.combine in _EXCHANGES
    if in_place or (exchanges and all(map(_repeatable, done.kept))):
        again = []
        for mine, outputs in zip(done.kept, done.outputs, strict=True):
            results = copies(outputs)
            again.append(mine._replace(outputs=results if in_place else copies(results), inputs=results))
        return _made_again(again, done, done.signature.reduce_op)
    counts_twice = exchanges or done.signature.reduce_op in {"sum", "avg", "premul_sum"}
    return [[output + output if counts_twice else output for output in outputs] for outputs in done.outputs]


def _made_again(members: Sequence[Operands], done: CompletedCall, reduce_op: str) -> list[Sequence[Tensor]]:
    done.combine(members, reduce_op, done.signature.root)
    return [operands.outputs for operands in members]


_IN_PLACE = (arithmetic.all_reduce, arithmetic.reduce, arithmetic.broadcast)
_EXCHANGES = (arithmetic.all_to_all, arithmetic.all_to_all_single)


def _repeatable(mine: Operands) -> bool:
    """Whether the outputs of an exchange could be its inputs."""
    shapes = [tensor.shape for tensor in mine.outputs], [tensor.shape for tensor in mine.inputs]
    return shapes[0] == shapes[1] and mine.output_rows == mine.input_rows


def _listed(mine: Operands, member: int, size: int) -> list[Tensor]:
    return [_fitting(mine.inputs[i % len(mine.inputs)], output) for i, output in enumerate(mine.outputs)]


def _handed_out(mine: Operands, member: int, size: int) -> list[Tensor]:
    return [mine.inputs[member]] if mine.inputs else list(mine.outputs)


def _swapped_rows(mine: Operands, member: int, size: int) -> list[Tensor]:
    own = mine.inputs[0].split(list(mine.input_rows))[member]
    blocks = mine.outputs[0].split(list(mine.output_rows))
    return [torch.cat([_fitting(own, block) for block in blocks])]


def _fitting(value: Tensor, output: Tensor) -> Tensor:
    """The value where it has the output's size, zeros where it has not."""
    return value.reshape(output.shape) if value.numel() == output.numel() else torch.zeros_like(output)


_ALONE: dict[Combine, Callable[[Operands, int, int], list[Tensor]]] = {
    arithmetic.all_gather: lambda mine, _member, size: [torch.cat([t.reshape(-1)] * size) for t in mine.inputs],
    arithmetic.all_gather_lists: _listed,
    arithmetic.gather: _listed,
    arithmetic.reduce_scatter: lambda mine, member, size: [t.reshape(size, -1)[member] for t in mine.inputs],
    arithmetic.reduce_scatter_lists: _handed_out,
    arithmetic.scatter: _handed_out,
    arithmetic.all_to_all: lambda mine, member, _size: [_fitting(mine.inputs[member], out) for out in mine.outputs],
    arithmetic.all_to_all_single: _swapped_rows,
}
"""Of the ops not named here, a rank's own outputs are what it has alone."""
