"""What a rank says in a call: the part that all ranks must say alike, and the ledger's Call made from it.

Payload: numel * element size of the tensors that the contract names, never their storage. all_reduce, broadcast, send,
recv, reduce: the tensor; all_gather: the gathered output; reduce_scatter: the full input; all_to_all: one rank's total
send; gather: this rank's input; scatter: this rank's output; barrier: nothing. Lists and coalesced tensors are summed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from harness.ledger import Call, shape_text

__all__ = [
    "REDUCE_OPS",
    "Shapes",
    "Signature",
    "call_of",
    "described",
    "difference",
    "dtype_text",
    "field_words",
    "shapes_of",
]

Shapes = tuple[tuple[int, ...], ...]

_WORDS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")
REDUCE_OPS: dict[int, str] = {getattr(ReduceOp, word.upper()).value: word for word in _WORDS}
"""torch's reduce ops, by their number, in the ledger's words."""

_DTYPES = {dtype: str(dtype).removeprefix("torch.") for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


class Signature(NamedTuple):
    """What every rank of a group must say alike in one call; shapes are those that must agree, not the payload's.

    `form`: "single", "list" or "coalesced", the way tensors are handed over. `root` is a group rank, -1 without one.
    """

    op: str
    form: str
    reduce_op: str
    root: int
    dtype: str
    shapes: Shapes


_FIELDS: dict[str, tuple[str, Callable[[Signature], object]]] = {
    "op": ("the op", lambda said: said.op),
    "form": ("the form", lambda said: said.form),
    "reduce_op": ("the reduce op", lambda said: said.reduce_op),
    "root": ("the root", lambda said: said.root),
    "dtype": ("the dtype", lambda said: said.dtype),
    "shapes": ("the shape", lambda said: shape_text(said.shapes) or "scalar"),
}
"""Field -> its name and value in messages; what differs first is told."""


def shapes_of(tensors: Sequence[Tensor]) -> Shapes:
    """The shapes of several tensors."""
    return tuple([tensor.shape for tensor in tensors])


def dtype_text(tensors: Sequence[Tensor]) -> str:
    """ "float32"; the dtypes of coalesced tensors are joined with + where they differ; "" without tensors."""
    if len(tensors) == 1:
        return _DTYPES[tensors[0].dtype]
    return "+".join(dict.fromkeys(_DTYPES[tensor.dtype] for tensor in tensors))


def difference(one: Signature, other: Signature) -> str:
    """The first field in which two signatures differ. They must differ."""
    return next(name for name in _FIELDS if getattr(one, name) != getattr(other, name))


def field_words(field: str, said: Signature) -> tuple[str, str]:
    """A field's name and its value, as messages print them."""
    name, value = _FIELDS[field]
    return name, str(value(said))


def described(said: Signature) -> str:
    """What a call says, in short: "sum float32 4x8"; a root and a form only where there is one to speak of."""
    words = [said.reduce_op, said.dtype, shape_text(said.shapes)]
    words += [f"root {said.root}"] if said.root >= 0 else []
    words += [f"({said.form})"] if said.form != "single" else []
    return " ".join(word for word in words if word)


def call_of(
    said: Signature, payload: Sequence[Tensor], ranks: tuple[int, ...], description: str, peer: int, is_async: bool
) -> Call:
    """The ledger's Call: `payload` are the tensors whose bytes count, `peer` a global rank or -1."""
    return Call(
        op=said.op,
        reduce_op=said.reduce_op,
        group=ranks,
        group_desc=description,
        dtype=said.dtype,
        shapes=tuple([tuple(tensor.shape) for tensor in payload]),
        payload_bytes=sum(tensor.numel() * tensor.element_size() for tensor in payload),
        is_async=is_async,
        peer=peer,
        device=payload[0].device.type if payload else "cpu",
    )
