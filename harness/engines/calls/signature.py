"""The signature of a call, in which all ranks must agree, and the ledger's Call made from it.

Payload: numel * element size of the tensors that the contract names, never their storage. all_reduce, broadcast, send,
recv, reduce: the tensor. all_gather: the gathered output; reduce_scatter: the full input; all_to_all: one rank's total
send. gather: this rank's input; scatter: this rank's output; barrier: nothing. Lists and coalesced tensors are summed.
"""

import inspect
import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ReduceOp
from torch.utils import checkpoint

from shardproof.harness.ledger import Call, shape_text
from shardproof.harness.torch_internals.autograd import function_context

_MOVES = ("all_to_all", "reduce_scatter")
"""Ops whose gradient goes back as another call (harness.checking.laws)."""


def needs_gradient(op: str, payload: Sequence[Tensor]) -> bool:
    """Whether a gradient must come back for what a call issued now sends; False for ops that are no move.

    Uncertain calls give False too: of leaves outside of a Function, where gradients are off, and of torch's C++
    Functions. Autograd cannot see a collective, so that a program wraps it in a Function to get its gradient. Gradients
    are off in the forward of a Function: there its inputs decide. A copy of an input counts as the input where all
    inputs want a gradient.
    """
    if op not in _MOVES:
        return False
    if torch.is_grad_enabled():
        return any(tensor.requires_grad and not tensor.is_leaf for tensor in payload)
    frame: FrameType | None = sys._getframe(1)
    inner: FrameType | None = None
    while frame is not None and frame.f_code.co_filename != checkpoint.__file__:
        in_forward, context = function_context(frame, inner)
        if in_forward:
            given = [tensor for tensor in _arguments(frame) if tensor.is_floating_point()]
            wanted = any(tensor.requires_grad for tensor in payload) or all(tensor.requires_grad for tensor in given)
            # Where gradients were off around the Function, its node has none to pass them on to.
            return bool(given) and wanted and bool(getattr(context, "next_functions", True))
        inner, frame = frame, frame.f_back
    return False


def _arguments(frame: FrameType) -> Iterator[Tensor]:
    """The tensors that the function of a frame was called with."""
    code = frame.f_code
    varying = sum(bool(code.co_flags & flag) for flag in (inspect.CO_VARARGS, inspect.CO_VARKEYWORDS))
    for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + varying]:
        value = frame.f_locals.get(name)
        for part in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(part, Tensor):
                yield part


Shapes = tuple[tuple[int, ...], ...]

_WORDS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")
REDUCE_OPS: dict[int, str] = {getattr(ReduceOp, word.upper()).value: word for word in _WORDS}
"""torch's reduce ops, by their number, in the ledger's words."""

_WRITING = ("all_gather", "broadcast")
"""Ops whose payload is what they write."""
_DTYPES = {dtype: str(dtype).removeprefix("torch.") for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


class Signature(NamedTuple):
    """The arguments in which every rank of a group must agree; shapes are those that must agree, not the payload's.

    `form`: how tensors are passed ("single", "list", "coalesced", "flat"), strides that are not contiguous, or an
    unknown operator's name. `root` is a group rank, -1 without one.
    """

    op: str
    form: str
    reduce_op: str
    root: int
    dtype: str
    shapes: Shapes


NOT_KNOWN: Any = None
"""A field of a signature that was read from a file which does not have it. The signatures of engines know all."""


def signature_of(
    op: str, tensors: Sequence[Tensor], *, form: str = "", reduce_op: str = "", root: int = -1
) -> Signature:
    """The signature of a call in whose tensors' dtypes and shapes all ranks must agree.

    `form` is by the number of tensors unless given: "single", or "coalesced".
    """
    if len(tensors) == 1:
        return Signature(op, form or "single", reduce_op, root, _DTYPES[tensors[0].dtype], (tensors[0].shape,))
    return Signature(op, form or "coalesced", reduce_op, root, dtype_text(tensors), shapes_of(tensors))


def shapes_of(tensors: Sequence[Tensor]) -> Shapes:
    """The shapes of several tensors."""
    return tuple([tensor.shape for tensor in tensors])


def dtype_text(tensors: Sequence[Tensor]) -> str:
    """ "float32"; the dtypes of coalesced tensors are joined with + where they differ; "" without tensors."""
    if len(tensors) == 1:
        return _DTYPES[tensors[0].dtype]
    return "+".join(dict.fromkeys(_DTYPES[tensor.dtype] for tensor in tensors))


def difference(one: Signature, other: Signature) -> str:
    """The first field in which two signatures are known to differ; "" for none."""
    fields = zip(Signature._fields, one, other, strict=True)
    return next((name for name, a, b in fields if a != b and a is not NOT_KNOWN and b is not NOT_KNOWN), "")


def field_text(field: str, signature: Signature) -> str:
    """A field's value, as messages print it."""
    return shape_text(signature.shapes) or "scalar" if field == "shapes" else str(getattr(signature, field))


def described(signature: Signature) -> str:
    """A signature in short: "sum float32 4x8"; a root only where there is one, a form unless it is "single".

    Fields that are not known are left out.
    """
    words = [signature.reduce_op, signature.dtype, shape_text(signature.shapes or ())]
    words += [f"root {signature.root}"] if signature.root is not NOT_KNOWN and signature.root >= 0 else []
    words += [f"({signature.form})"] if signature.form not in ("single", NOT_KNOWN) else []
    return " ".join(word for word in words if word)


def call_of(
    signature: Signature, payload: Sequence[Tensor], ranks: tuple[int, ...], description: str, peer: int, is_async: bool
) -> Call:
    """The ledger's Call: `payload` are the tensors whose bytes count, `peer` a global rank or -1."""
    return Call(
        op=signature.op,
        reduce_op=signature.reduce_op,
        group=ranks,
        group_desc=description,
        dtype=signature.dtype,
        shapes=tuple([tuple(tensor.shape) for tensor in payload]),
        payload_bytes=sum(tensor.numel() * tensor.element_size() for tensor in payload),
        is_async=is_async,
        peer=peer,
        device=payload[0].device.type if payload else "cpu",
        address=address_of(signature, payload),
        needs_gradient=needs_gradient(signature.op, payload),
    )


def address_of(signature: Signature, payload: Sequence[Tensor]) -> int:
    """Where a call writes first in memory; 0 for one that does not write its payload, or whose tensors have none."""
    if not payload or signature.op not in _WRITING:
        return 0
    try:
        return payload[0].data_ptr()
    except RuntimeError:
        return 0
