"""The operators of c10d that are known here, by name.

Source: the schemas of the `c10d::` operators of torch 2.11 to 2.15.
"""

from typing import Any, NamedTuple

from shardproof.harness.torch_internals.operators import arguments_of

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
"""The payload must agree unless `agree` is given; `form` follows from the number of tensors."""


def communicates(operator: Any) -> bool:
    """Whether an operator takes a process group: others of c10d send nothing."""
    return any(argument.kind == "group" for argument in arguments_of(operator))
