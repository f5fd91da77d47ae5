"""The operators of c10d, by name, and the call that each issues, read from its arguments in the ledger's words.

Source: the schemas of the `c10d::` operators of torch 2.11 to 2.15. An operator's root and peer are group ranks; the
`peer` of its Call is a global rank. An operator that is not in OPERATORS is read from its schema alone: the group, and
all its tensors as the payload.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from shardproof.harness.engines.calls.signature import REDUCE_OPS, Signature, call_of, dtype_text, member_of, shapes_of
from shardproof.harness.ledger import OTHER, Call
from shardproof.harness.torch_internals.dispatch import arguments_of
from shardproof.harness.torch_internals.world import ranks_of

MESSAGES = ("send", "recv")


class Operator(NamedTuple):
    """The ledger's op of an operator; which arguments are the payload, the peer, and the tensors that must agree."""

    op: str
    payload: str = ""
    peer: str = ""
    agree: str = ""
    form: str = ""


OPERATORS = {
    "broadcast_": Operator("broadcast", "tensors", "root_rank"),
    "allreduce_": Operator("all_reduce", "tensors"),
    "allreduce_coalesced_": Operator("all_reduce", "tensors"),
    "allgather_": Operator("all_gather", "output_tensors", form="list"),
    "_allgather_base_": Operator("all_gather", "output_tensor", agree="input_tensor"),
    "allgather_coalesced_": Operator("all_gather", "output_lists", form="list"),
    "allgather_into_tensor_coalesced_": Operator("all_gather", "outputs", agree="inputs"),
    "reduce_scatter_": Operator("reduce_scatter", "input_tensors", form="list"),
    "_reduce_scatter_base_": Operator("reduce_scatter", "input_tensor"),
    "reduce_scatter_tensor_coalesced_": Operator("reduce_scatter", "inputs"),
    "alltoall_": Operator("all_to_all", "input_tensors", form="list"),
    "alltoall_base_": Operator("all_to_all", "input"),
    "reduce_": Operator("reduce", "tensors", "root_rank"),
    "gather_": Operator("gather", "input_tensors", "root_rank"),
    "gather_into_tensor_": Operator("gather", "input_tensor", "root_rank", form="flat"),
    "scatter_": Operator("scatter", "output_tensors", "root_rank"),
    "send": Operator("send", "tensors", "dst"),
    "recv_": Operator("recv", "tensors", "src"),
    "recv_any_source_": Operator("recv", "tensors"),
    "barrier": Operator("barrier"),
    "monitored_barrier_": Operator("barrier"),
}
"""The payload must agree across ranks, or `agree` if given. Without a `form` it follows from the number of tensors."""


def communicates(operator: Any) -> bool:
    """Whether an operator takes a process group; other operators of c10d send nothing."""
    return any(argument.kind == "group" for argument in arguments_of(operator))


class OperatorCall(NamedTuple):
    """A call, read from its operator's arguments. `group` is torch's name of the group, `tag` that of a message.

    `sends` and `expects`: what an all_to_all sends to and expects from every rank of the group, rows or shapes.
    """

    rank: int
    call: Call
    signature: Signature
    group: str
    tag: int
    sends: tuple[Any, ...] = ()
    expects: tuple[Any, ...] = ()


def make_reader(name: str, operator: Any) -> Callable[[Sequence[Any]], OperatorCall]:
    """A function from an operator's arguments to the call."""
    if name not in OPERATORS:
        return _from_schema(name, operator)
    described = OPERATORS[name]
    op, rooted = described.op, described.peer == "root_rank"
    places = {argument.name: i for i, argument in enumerate(arguments_of(operator))}
    payload_at, peer_at = places.get(described.payload, -1), places.get(described.peer, -1)
    agree_at, tag_at = places.get(described.agree, -1), places.get("tag", -1)
    group_at, reduce_at, async_at = places["process_group"], places.get("reduce_op", -1), places.get("async_op", -1)

    peer_name = f"{op} {'root' if rooted else 'peer'}"
    exchanged = _shapes_exchanged if described.form == "list" else _rows_exchanged

    def read(arguments: Sequence[Any]) -> OperatorCall:
        group = dist.ProcessGroup.unbox(arguments[group_at])
        ranks = ranks_of(group)
        payload = tensors_in(arguments[payload_at]) if payload_at >= 0 else []
        reduce_op = REDUCE_OPS[arguments[reduce_at].op()] if reduce_at >= 0 else ""
        if op in MESSAGES:
            is_async = not _is_blocking_call(op, sys._getframe(1).f_back)
        else:
            # Trailing arguments that equal their default, which means asynchronous, are not passed.
            is_async = async_at >= 0 and (len(arguments) <= async_at or bool(arguments[async_at]))
        agreeing = tensors_in(arguments[agree_at]) if agree_at >= 0 else payload
        shapes = shapes_of(agreeing)
        if op == "all_to_all":  # ranks may send different numbers of rows and lists
            shapes = () if described.form == "list" else tuple([tuple(tensor.shape[1:]) for tensor in payload])
        root, form = arguments[peer_at] if rooted else -1, "single" if len(agreeing) == 1 else "coalesced"
        signature = Signature(op, described.form or form, reduce_op, root, dtype_text(payload), shapes)
        peer = ranks[member_of(peer_name, arguments[peer_at], len(ranks))] if peer_at >= 0 else -1
        call = call_of(signature, payload, ranks, group.group_desc, peer, is_async)
        tag = arguments[tag_at] if tag_at >= 0 else 0
        sends, expects = exchanged(arguments, len(ranks)) if op == "all_to_all" else ((), ())
        return OperatorCall(ranks[group.rank()], call, signature, group.group_name, tag, sends, expects)

    return read


def _rows_exchanged(arguments: Sequence[Any], size: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """all_to_all_single, (output, input, group, output rows, input rows): the rows sent and expected."""
    output, source, _, expects, sends = arguments[:5]
    same = not sends and not expects and output.numel() == source.numel()  # elements are shared, whatever the shapes
    return tuple(sends) or _split_evenly(source, size), tuple(expects) or _split_evenly(
        source if same else output, size
    )


def _split_evenly(tensor: Tensor, size: int) -> tuple[int, ...]:
    """Equal shares of dim 0. A dim that `size` does not divide, or none at all, is an error that the rank raises."""
    return (tensor.shape[0] // size,) * size if tensor.dim() else ()


def _shapes_exchanged(arguments: Sequence[Any], size: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """all_to_all, (outputs, inputs, ...): the shapes sent and expected."""
    return tuple(tuple(t.shape) for t in arguments[1]), tuple(tuple(t.shape) for t in arguments[0])


def _from_schema(name: str, operator: Any) -> Callable[[Sequence[Any]], OperatorCall]:
    """A reader of an operator that is not in OPERATORS. Ranks must agree only in the operator's name, as its `form`."""
    described = arguments_of(operator)
    places = {argument.name: i for i, argument in enumerate(described)}
    group_at = next(i for i, argument in enumerate(described) if argument.kind == "group")
    tensors_at = [i for i, argument in enumerate(described) if argument.kind == "tensors"]
    async_at = places.get("async_op", -1)
    signature = Signature(OTHER, name, "", -1, "", ())

    def read(arguments: Sequence[Any]) -> OperatorCall:
        group = dist.ProcessGroup.unbox(arguments[group_at])
        ranks = ranks_of(group)
        given = [arguments[i] for i in tensors_at if i < len(arguments) and arguments[i] is not None]
        payload = [tensor for argument in given for tensor in tensors_in(argument)]
        is_async = async_at >= 0 and (len(arguments) <= async_at or bool(arguments[async_at]))
        read_as = signature._replace(dtype=dtype_text(payload))
        call = call_of(read_as, payload, ranks, group.group_desc, -1, is_async)
        return OperatorCall(
            ranks[group.rank()], replace(call, operator=f"c10d::{name}"), signature, group.group_name, 0
        )

    return read


def tensors_in(argument: Any) -> list[Tensor]:
    """The tensors of an argument: one, a list, or a list of lists."""
    if isinstance(argument, Tensor):
        return [argument]
    return [tensor for part in argument for tensor in tensors_in(part)]


def _is_blocking_call(op: str, frame: FrameType | None) -> bool:
    """Whether dist.send or dist.recv, which are isend or irecv and a wait, is among the nearest callers."""
    for _caller in range(4):
        if frame is None:
            return False
        if frame.f_code.co_name == op and frame.f_globals is vars(c10d):
            return True
        frame = frame.f_back
    return False
