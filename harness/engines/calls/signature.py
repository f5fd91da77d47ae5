"""The signature of a call, in which all ranks must agree, the ledger's Call made from it, and the checks of arguments.

Payload: numel * element size of these tensors, never their storage. all_reduce, broadcast, send, recv, reduce: the
tensor. all_gather: the gathered output; reduce_scatter: the full input; all_to_all: one rank's total send. gather: this
rank's input; scatter: this rank's output; barrier: nothing. Lists and coalesced tensors are summed.

Arguments of torch's process group methods are checked here as far as one rank alone can. What takes two ranks is
checked when calls are matched. Whatever gloo or NCCL accepts is accepted. A wrong argument raises WrongArgument in the
rank's own code. The error names the value and the rule, and mostly a legal value too.
"""

import inspect
import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.distributed import ReduceOp
from torch.utils import checkpoint

from shardproof.harness.ledger import Call, shape_text
from shardproof.harness.torch_internals.autograd import function_context
from shardproof.harness.torch_internals.world import Pending, wait_pending

_MOVES = ("all_to_all", "reduce_scatter")
"""Ops whose gradient communicates in backward (harness.checking.laws)."""


def needs_gradient(op: str, payload: Sequence[Tensor]) -> bool:
    """Whether a gradient must come back for what a call issued now sends; False for ops that have no such gradient.

    Autograd cannot see a collective, so a program wraps it in a Function to get its gradient. Gradients are off in the
    forward of a Function, so there its inputs decide. A copy of an input counts as the input if all inputs require a
    gradient. False also where this is uncertain: outside of a Function for leaves or while gradients are off, and for
    torch's C++ Functions.
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
            given = [tensor for tensor in _tensor_arguments(frame) if tensor.is_floating_point()]
            wanted = any(tensor.requires_grad for tensor in payload) or all(tensor.requires_grad for tensor in given)
            # If gradients were off around the Function, its node passes them on to nothing.
            return bool(given) and wanted and bool(getattr(context, "next_functions", True))
        inner, frame = frame, frame.f_back
    return False


def _tensor_arguments(frame: FrameType) -> Iterator[Tensor]:
    """The tensors with which the function of a frame was called."""
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
"""Ops whose payload is their output."""
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
"""The value of a field that a file does not have. Signatures of engines have all fields."""


def signature_of(
    op: str, tensors: Sequence[Tensor], *, form: str = "", reduce_op: str = "", root: int = -1
) -> Signature:
    """The signature of a call in whose tensors' dtypes and shapes all ranks must agree.

    `form` follows from the number of tensors unless given: "single", or "coalesced".
    """
    if len(tensors) == 1:
        return Signature(op, form or "single", reduce_op, root, _DTYPES[tensors[0].dtype], (tensors[0].shape,))
    return Signature(op, form or "coalesced", reduce_op, root, dtype_text(tensors), shapes_of(tensors))


def shapes_of(tensors: Sequence[Tensor]) -> Shapes:
    """The shapes of several tensors."""
    return tuple([tensor.shape for tensor in tensors])


def dtype_text(tensors: Sequence[Tensor]) -> str:
    """ "float32"; different dtypes of coalesced tensors are joined with +; "" without tensors."""
    if len(tensors) == 1:
        return _DTYPES[tensors[0].dtype]
    return "+".join(dict.fromkeys(_DTYPES[tensor.dtype] for tensor in tensors))


def first_difference(one: Signature, other: Signature) -> str:
    """The first field in which two signatures are known to differ; "" for none."""
    fields = zip(Signature._fields, one, other, strict=True)
    return next((name for name, a, b in fields if a != b and a is not NOT_KNOWN and b is not NOT_KNOWN), "")


def field_text(field: str, signature: Signature) -> str:
    """A field's value, as messages print it."""
    return shape_text(signature.shapes) or "scalar" if field == "shapes" else str(getattr(signature, field))


def describe_signature(signature: Signature) -> str:
    """A signature in short: "sum float32 4x8", with a root if there is one, and a form unless it is "single".

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
        computed=is_computed(payload),
    )


def is_computed(payload: Sequence[Tensor]) -> bool:
    """Whether autograd computed a tensor of a payload: batches, parameters and gradients have no node that made them.

    A clone does not count as computed, since functional collectives send clones of what they are given.
    """
    return any(_without_clones(tensor.grad_fn) is not None for tensor in payload)


def _without_clones(node: Node | None) -> Node | None:
    """The node that made a tensor, before any clones; None for a leaf."""
    while node is not None and node.name() == "CloneBackward0":
        node = node.next_functions[0][0]
    return None if node is None or node.name().endswith("AccumulateGrad") else node


def address_of(signature: Signature, payload: Sequence[Tensor]) -> int:
    """The first address that a call writes; 0 if it does not write its payload, or its tensors have no memory."""
    if not payload or signature.op not in _WRITING:
        return 0
    try:
        return payload[0].data_ptr()
    except RuntimeError:
        return 0


_ANY_DTYPE = ("sum", "max", "min", "product")
_CARRIED = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16}
    | {torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool}
    | {torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz}
)
"""The dtypes that gloo or NCCL sends; torch itself sends complex tensors as pairs of real numbers."""


class WrongArgument(ValueError, RuntimeError):
    """An argument of a call that is wrong whatever the other ranks do. gloo raises RuntimeError, NCCL ValueError: this
    is both.
    """


def check_tensors(tensors: Any, *, layout: str = "contiguous") -> list[Tensor]:
    """Plain tensors; a functional collective's pending output is waited for. Raises WrongArgument.

    `layout` says which strides gloo computes right with: those of "contiguous" tensors; of "dense" ones, whose dims may
    be in another order; or "any", also with gaps and overlaps, where gloo copies the tensor.
    """
    plain = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    for i, tensor in enumerate(plain):
        if type(tensor) is not Tensor and isinstance(tensor, Pending):
            plain[i] = wait_pending(tensor)
        if tensor.dtype not in _CARRIED:
            legal = "torch.view_as_real(tensor)" if tensor.is_complex() else "tensor.to(torch.int32)"
            raise WrongArgument(f"tensor of {tensor.dtype}: neither gloo nor NCCL carries it; legal: {legal}")
        if tensor.layout is not torch.strided:
            raise WrongArgument(f"tensor of layout {tensor.layout}: must be dense; legal: tensor.to_dense()")
        if not (tensor.is_contiguous() or layout == "any" or (layout == "dense" and _is_dense(tensor))):
            raise WrongArgument(
                f"tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()}: must be contiguous, since NCCL "
                "refuses it and gloo takes what lies beside it in memory; legal: tensor.contiguous()"
            )
    return plain


def as_real(tensors: Any) -> list[Tensor]:
    """Complex tensors as pairs of real numbers, all others as they are."""
    plain = [tensors] if isinstance(tensors, Tensor) else tensors
    return [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in plain]


def form_of(tensors: Sequence[Tensor]) -> str:
    """The strides of a tensor that is not contiguous, in which ranks must agree; "" for all others."""
    return f"strides {tensors[0].stride()}" if len(tensors) == 1 and not tensors[0].is_contiguous() else ""


def _is_dense(tensor: Tensor) -> bool:
    """Whether the tensor has neither gaps nor overlaps in memory."""
    filled = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != filled:
            return False
        filled *= size
    return True


def of_one_dtype(op: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """Raises WrongArgument if outputs have other dtypes than inputs."""
    if not outputs or not inputs:
        return
    if len(outputs) == len(inputs) == 1:
        differ = outputs[0].dtype is not inputs[0].dtype
    elif len(outputs) == len(inputs):
        differ = any(one.dtype is not other.dtype for one, other in zip(outputs, inputs, strict=True))
    else:
        differ = {one.dtype for one in outputs} != {one.dtype for one in inputs}
    if differ:
        rule = f"must be of the input's dtype, {inputs[0].dtype}"
        raise WrongArgument(f"{op} output of {outputs[0].dtype}: {rule}; legal: dtype={inputs[0].dtype}")


def reduction(opts: Any, tensors: list[Tensor]) -> tuple[str, Sequence[Tensor]]:
    """The reduce op's name and the tensors to reduce: the given list itself, or copies scaled by a factor.

    `opts` are torch's options, a reduce op, or None. Raises WrongArgument for an op that the dtype does not have.
    """
    given = getattr(opts, "reduceOp", opts)
    name = "sum" if given is None else REDUCE_OPS[hash(given)]  # torch's hash of a reduce op is its number
    if name in _ANY_DTYPE:
        return name, tensors
    if name == "premul_sum":
        factor = given.__getstate__()[1]
        return name, [(tensor.detach() * factor).to(tensor.dtype) for tensor in tensors]
    for tensor in tensors:
        if name == "avg" and tensor.dtype is torch.bool:
            raise WrongArgument(f"reduce op {name} on {tensor.dtype}: needs numbers; legal: torch.float32")
        if name != "avg" and tensor.is_floating_point():
            raise WrongArgument(f"reduce op {name} on {tensor.dtype}: needs integers or bool; legal: torch.int32")
    return name, tensors


def root_of(op: str, opts: Any, size: int) -> int:
    """The root's group rank, from torch's options or as given. Raises WrongArgument outside of the group."""
    return member_of(f"{op} root", int(getattr(opts, "rootRank", opts or 0)), size)


def member_of(what: str, member: int, size: int) -> int:
    """A group rank. Raises WrongArgument for one that the group does not have."""
    if not 0 <= member < size:
        raise WrongArgument(f"{what} {member}: must be a rank of the group, 0 to {size - 1}; legal: 0")
    return member


def split_exchange(
    output: Tensor, source: Tensor, output_rows: Any, input_rows: Any, size: int
) -> tuple[Tensor, list[int], list[int]]:
    """The output of an all_to_all_single, and the rows of dim 0 for every peer: as given, else equal shares.

    Without sizes the elements are shared equally, whatever the shapes. Raises TypeError for sizes that are no numbers,
    WrongArgument for wrong numbers.
    """
    expects, sends = (
        _as_whole_numbers("output_split_sizes", output_rows),
        _as_whole_numbers("input_split_sizes", input_rows),
    )
    if not expects and not sends and output.numel() == source.numel():
        output = output.view(source.shape)
    return output, _rows_of("output", output, expects, size), _rows_of("input", source, sends, size)


def _rows_of(which: str, tensor: Tensor, counts: list[int], size: int) -> list[int]:
    if not tensor.dim():
        raise WrongArgument(f"all_to_all {which} of one number: must have a dim of rows; legal: {which}.view(1)")
    total = tensor.shape[0]
    if counts:
        if len(counts) != size or sum(counts) != total or min(counts) < 0:
            rule = f"must be {size} numbers, none below 0, that add up to dim 0, {total}"
            raise WrongArgument(f"all_to_all {which}_split_sizes {counts}: {rule}")
        return counts
    if total % size:
        rule = f"dim 0 must be divisible by the group's size {size}"
        raise WrongArgument(f"all_to_all {which} of shape {tuple(tensor.shape)}: {rule}; legal: {which}_split_sizes")
    return [total // size] * size


def _as_whole_numbers(name: str, given: Any) -> list[int]:
    """Integers from a sequence of any kind that torch takes: of Python, of numpy, tensors of one element.

    [] for None. Raises TypeError for what torch refuses too: floats, text, a tensor in place of the sequence.
    """
    if given is None:
        return []
    if isinstance(given, Tensor | str | bytes) or any(isinstance(one, float | str | bytes) for one in given):
        raise TypeError(f"{name}={given!r}: must be a sequence of whole numbers; legal: [1, 1]")
    return [int(one) for one in given]


def check_list(given: Any) -> Any:
    """The tensors of a list, or of a list whose only entry is such a list: torch has calls of both forms."""
    return given[0] if len(given) == 1 and not isinstance(given[0], Tensor) else given


def check_size(op: str, which: str, tensor: Tensor, numel: int, rule: str) -> None:
    """Raises WrongArgument unless the tensor has `numel` elements."""
    if tensor.numel() != numel:
        raise WrongArgument(f"{op} {which} of {tensor.numel()} elements: must have as many as {rule}, {numel}")


def check_count(op: str, which: str, tensors: Sequence[Any], count: int) -> None:
    """Raises WrongArgument unless there are `count` tensors."""
    if len(tensors) != count:
        raise WrongArgument(f"{op} {which} of {len(tensors)} entries: must have {count}")
