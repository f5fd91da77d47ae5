"""Arithmetic of collectives: the tensors of all ranks of a group in, the outputs of all ranks written in place.

`members` holds one Operands a rank, in group-rank order. A reduction is computed once, in rank order, in the dtype of
its tensors, so every rank gets the same bits. Tensor by tensor, all inputs are read before an output is written: ranks
may share them. Works on any dtype and on meta tensors. An all_to_all with unequal sizes in a pair raises Disagreement.

Nothing here is seen by autograd, dispatch modes or function modes of the rank that happens to run it. Versions of the
outputs are counted up all the same. So autograd refuses a tensor that was saved for backward and then overwritten; gloo
and NCCL let such a program pass with a wrong gradient.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardproof.harness.torch_internals.dispatch import below_autograd, copy_each, modes_are_on, past_modes


class Operands(NamedTuple):
    """Operands of one rank in a call: outputs to write, inputs to read, rows per peer (all_to_all_single)."""

    outputs: Sequence[Tensor]
    inputs: Sequence[Tensor]
    output_rows: Sequence[int] = ()
    input_rows: Sequence[int] = ()


class Disagreement(Exception):
    """The first of the group ranks `ranks` sends the second another size than it expects; `words` has a {} for each."""

    def __init__(self, ranks: tuple[int, int], words: str) -> None:
        self.ranks = ranks
        super().__init__(words)


Combine = Callable[[Sequence[Operands], str, int], None]
"""Computes and writes, given (members, reduce op, root)."""

_Reducer = Callable[[Tensor, Tensor], Tensor]
_REDUCERS: dict[str, tuple[_Reducer, _Reducer]] = {
    "sum": (torch.add, Tensor.add_),
    "avg": (torch.add, Tensor.add_),
    "premul_sum": (torch.add, Tensor.add_),
    "product": (torch.mul, Tensor.mul_),
    "max": (torch.maximum, lambda total, tensor: torch.maximum(total, tensor, out=total)),
    "min": (torch.minimum, lambda total, tensor: torch.minimum(total, tensor, out=total)),
    "band": (torch.bitwise_and, Tensor.bitwise_and_),
    "bor": (torch.bitwise_or, Tensor.bitwise_or_),
    "bxor": (torch.bitwise_xor, Tensor.bitwise_xor_),
}
"""reduce op -> (a new tensor from two, a further tensor into the total)."""


def perform(combine: Combine, members: Sequence[Operands], reduce_op: str, root: int) -> None:
    """Run one collective, unseen by autograd and by the modes of the calling thread. Raises Disagreement."""
    unseen: Any = below_autograd
    for member in members:
        if member.outputs and member.outputs[0].is_inference():
            unseen = torch.inference_mode  # torch forbids to write tensors of inference mode outside of it
            break
    with unseen():
        if modes_are_on():
            with past_modes():
                combine(members, reduce_op, root)
        else:
            combine(members, reduce_op, root)


def all_reduce(members: Sequence[Operands], reduce_op: str, root: int) -> None:
    """outputs[i] = the reduction of every rank's inputs[i]."""
    if len(members) == 1 and members[0].inputs is members[0].outputs:
        return
    for i in range(len(members[0].inputs)):
        total = _reduce_in_order([member.inputs[i] for member in members], reduce_op)
        _put_all([member.outputs[i] for member in members], total)


def reduce(members: Sequence[Operands], reduce_op: str, root: int) -> None:
    """The root's output = the reduction; the other ranks' tensors stay as they are."""
    _put_all([members[root].outputs[0]], _reduce_in_order([member.inputs[0] for member in members], reduce_op))


def broadcast(members: Sequence[Operands], reduce_op: str, root: int) -> None:
    """Every other rank's outputs[i] = the root's."""
    for i, source in enumerate(members[root].inputs):
        _put_all([member.outputs[i] for rank, member in enumerate(members) if rank != root], source)


def all_gather(members: Sequence[Operands], reduce_op: str, root: int) -> None:
    """outputs[i] = the inputs[i] of all ranks, one after the other."""
    for i in range(len(members[0].inputs)):
        full = torch.cat([member.inputs[i].reshape(-1) for member in members])
        outputs = [member.outputs[i] for member in members]
        _put_each(outputs, [full.view(output.shape) for output in outputs])


def all_gather_lists(members: Sequence[Operands], reduce_op: str, root: int) -> None:
    """n inputs a rank: outputs[r * n + i] = inputs[i] of rank r."""
    sources = [tensor.clone() for member in members for tensor in member.inputs]
    _put_each([tensor for member in members for tensor in member.outputs], sources * len(members))


def reduce_scatter(members: Sequence[Operands], reduce_op: str, root: int) -> None:
    """outputs[i] of rank r = part r of the reduction of all inputs[i]."""
    for i in range(len(members[0].inputs)):
        parts = _reduce_in_order([member.inputs[i] for member in members], reduce_op).reshape(-1).chunk(len(members))
        outputs = [member.outputs[i] for member in members]
        _put_each(outputs, [part.view(output.shape) for part, output in zip(parts, outputs, strict=True)])


def reduce_scatter_lists(members: Sequence[Operands], reduce_op: str, root: int) -> None:
    """The output of rank r = the reduction of every rank's inputs[r]; the inputs may differ in size."""
    parts = [_reduce_in_order([member.inputs[rank] for member in members], reduce_op) for rank in range(len(members))]
    _put_each([member.outputs[0] for member in members], parts)


def all_to_all(members: Sequence[Operands], reduce_op: str, root: int) -> None:
    """outputs[s] of rank r = inputs[r] of rank s. Raises Disagreement when the shapes differ."""
    sends = [[tuple(tensor.shape) for tensor in member.inputs] for member in members]
    compare_sizes(sends, [[tuple(tensor.shape) for tensor in member.outputs] for member in members])
    sources = [other.inputs[receiver].clone() for receiver in range(len(members)) for other in members]
    _put_each([output for member in members for output in member.outputs], sources)


def all_to_all_single(members: Sequence[Operands], reduce_op: str, root: int) -> None:
    """Block r of rank s's input rows goes to block s of rank r's output. Raises Disagreement when row counts differ."""
    blocks = [member.inputs[0].split(list(member.input_rows)) for member in members]
    compare_sizes([member.input_rows for member in members], [member.output_rows for member in members])
    sources = [torch.cat([block[receiver] for block in blocks]) for receiver in range(len(members))]
    _put_each([member.outputs[0] for member in members], sources)


def compare_sizes(sends: Sequence[Sequence[Any]], expects: Sequence[Sequence[Any]]) -> None:
    """Compare what ranks send each other, in rows or shapes, with what these expect. Raises Disagreement."""
    for receiver, expected in enumerate(expects):
        for sender, size in enumerate(expected):
            sent = sends[sender][receiver]
            if sent != size:
                rows = " rows" if isinstance(sent, int) else ""
                words = f"rank {{}} sends {sent}{rows} to rank {{}}, which expects {size}"
                raise Disagreement((sender, receiver), words)


def gather(members: Sequence[Operands], reduce_op: str, root: int) -> None:
    """The root's outputs[r] = the input of rank r."""
    _put_each(members[root].outputs, [member.inputs[0].clone() for member in members])


def scatter(members: Sequence[Operands], reduce_op: str, root: int) -> None:
    """The output of rank r = the root's inputs[r]."""
    _put_each([member.outputs[0] for member in members], [part.clone() for part in members[root].inputs])


def meet(members: Sequence[Operands], reduce_op: str, root: int) -> None:
    """A barrier moves nothing."""


def transfer(members: Sequence[Operands], reduce_op: str, root: int) -> None:
    """Point to point: the receiver's (member 1) output = the sender's (member 0) input."""
    _put_all(members[1].outputs, members[0].inputs[0])


def _reduce_in_order(tensors: Sequence[Tensor], reduce_op: str) -> Tensor:
    """A new tensor, ((t0 op t1) op t2) ..., never one of the inputs; contiguous if these are, or if there is one."""
    if len(tensors) == 1:
        return tensors[0].clone(memory_format=torch.contiguous_format)
    first, further = _REDUCERS[reduce_op]
    total = first(tensors[0], tensors[1])
    for tensor in tensors[2:]:
        further(total, tensor)
    if reduce_op == "avg":
        total.div_(len(tensors), rounding_mode=None if total.is_floating_point() else "trunc")
    return total


def _put_all(outputs: Sequence[Tensor], value: Tensor) -> None:
    _put_each(outputs, [value] * len(outputs))


def _put_each(outputs: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    if outputs:
        copy_each(outputs, values)
