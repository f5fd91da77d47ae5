"""The process group of the in-process engine: one object a rank and group, handed to unmodified torch code.

Each method turns torch's arguments into a RankCall and issues it. Sizes that one rank alone can check are checked
here, with a WrongArgument in its own code, as gloo and NCCL do. Both generations of method names are defined
(`answers_torch`): torch 2.11 and 2.12 call others than later releases.
"""

import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from shardproof.harness.engines.calls import arithmetic
from shardproof.harness.engines.calls.arithmetic import Combine, Operands
from shardproof.harness.engines.calls.pending import ANY, RankGroup
from shardproof.harness.engines.calls.signature import (
    Signature,
    as_real,
    check_count,
    check_list,
    check_size,
    check_tensors,
    dtype_text,
    form_of,
    member_of,
    of_one_dtype,
    reduction,
    root_of,
    shapes_of,
    signature_of,
    split_exchange,
)
from shardproof.harness.engines.threads.matcher import COMPLETE, BatchedWorks, CollectiveMatcher, RankCall, Work
from shardproof.harness.torch_internals.world import answers_torch

_TorchGroup: Any = dist.ProcessGroup
"""Untyped on purpose: torch's stubs declare overloads that no Python subclass can match."""


@answers_torch
class GroupFacts(_TorchGroup):
    """Rank `member` of a group, with torch's names for its attributes; `splits` counts its calls of split_group."""

    def __init__(self, group: RankGroup, member: int, name: str) -> None:
        super().__init__(member, len(group.ranks))
        self._group, self._member, self._name = group, member, name
        self.splits = 0

    def rank(self) -> int:
        """This rank's place in the group."""
        return self._member

    def size(self) -> int:
        """Ranks in the group."""
        return len(self._group.ranks)

    @property
    def group_name(self) -> str:
        """The name under which operators find the group."""
        return self._name

    @property
    def group_desc(self) -> str:
        """The user's name of the group."""
        return self._group.description

    def getGroupName(self) -> str:
        """`group_name`, for C++."""
        return self._name

    def getGroupDesc(self) -> str:
        """`group_desc`, for C++."""
        return self._group.description

    def getBackendName(self) -> str:
        """A name that no C++ backend has: torch would look for that backend's object. dist.get_backend returns gloo."""
        return "inproc"

    def get_backend(self, device: torch.device) -> Self:
        """The group itself, which has no backend of torch and coalesces no messages."""
        return self

    @property
    def device_types(self) -> list[torch.device]:
        """The devices whose tensors the group takes."""
        return [torch.device("cpu"), torch.device("cuda")]

    def has_hooks(self) -> bool:
        """False: torch's hooks belong to its backends."""
        return False

    def get_group_store(self) -> Any:
        """The group's key-value store, in this process."""
        return self._group.store

    def shutdown(self) -> None:
        """Nothing to release: the group ends with the run."""

    def abort(self) -> None:
        """The same as `shutdown`."""


@answers_torch
class InprocGroup(GroupFacts):
    """Rank `member` of a group. Asynchronous calls return a Work, synchronous ones when they are complete."""

    def __init__(self, matcher: CollectiveMatcher, group: RankGroup, member: int, name: str) -> None:
        super().__init__(group, member, name)
        self._matcher, self._rank = matcher, group.ranks[member]
        self._batch: list[Work] | None = None

    # collectives

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None, *, op: Any = None) -> dist.Work:
        """all_reduce, also coalesced and functional."""
        outputs = check_tensors(tensors, layout="dense")
        reduce_op, inputs = reduction(opts if op is None else op, outputs)
        signature = signature_of("all_reduce", outputs, form=form_of(outputs), reduce_op=reduce_op)
        return self._issue(signature, Operands(outputs, inputs), arithmetic.all_reduce, outputs, opts)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None) -> dist.Work:
        """reduce: only the root's tensor changes."""
        outputs, root = check_tensors(tensors, layout="dense"), root_of("reduce", opts, self.size())
        reduce_op, inputs = reduction(getattr(opts, "reduceOp", op), outputs)
        signature = signature_of("reduce", outputs, form=form_of(outputs), reduce_op=reduce_op, root=root)
        return self._issue(signature, Operands(outputs, inputs), arithmetic.reduce, outputs, opts)

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        """broadcast."""
        outputs, root = check_tensors(tensors, layout="dense"), root_of("broadcast", opts, self.size())
        signature = signature_of("broadcast", outputs, form=form_of(outputs), root=root)
        return self._issue(signature, Operands(outputs, outputs), arithmetic.broadcast, outputs, opts)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """all_gather_single, coalesced; functional calls come here with one tensor."""
        outputs, inputs = check_tensors(outputs, layout="any"), check_tensors(inputs, layout="any")
        for output, shard in zip(outputs, inputs, strict=True):
            check_size("all_gather", "output", output, shard.numel() * self.size(), "the input times the group's size")
        signature = signature_of("all_gather", inputs)
        return self._issue(signature, Operands(outputs, inputs), arithmetic.all_gather, outputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def all_gather_single(self, output: Tensor, shard: Tensor, opts: Any = None) -> dist.Work:
        """all_gather_single (all_gather_into_tensor)."""
        return self.all_gather_single_coalesced((output,), (shard,), opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        """all_gather into a list; its tensors may differ in size."""
        gathered, inputs = check_tensors(check_list(outputs), layout="any"), check_tensors(inputs, layout="any")
        check_count("all_gather", "output list", gathered, self.size())
        check_size("all_gather", "output", gathered[self._member], inputs[0].numel(), "this rank's input")
        signature = Signature("all_gather", "list", "", -1, dtype_text(inputs), shapes_of(gathered))
        return self._issue(signature, Operands(gathered, inputs), arithmetic.all_gather_lists, gathered, opts)

    def allgather_coalesced(self, output_lists: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """all_gather_coalesced: one list of outputs for each rank."""
        inputs = check_tensors(inputs, layout="any")
        check_count("all_gather", "list of output lists", output_lists, self.size())
        gathered = check_tensors([tensor for outputs in output_lists for tensor in outputs], layout="any")
        check_count("all_gather", "output lists together", gathered, self.size() * len(inputs))
        signature = Signature("all_gather", "list", "", -1, dtype_text(inputs), shapes_of(gathered))
        return self._issue(signature, Operands(gathered, inputs), arithmetic.all_gather_lists, gathered, opts)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """reduce_scatter_single, coalesced; functional calls come here with one tensor."""
        outputs, fulls = check_tensors(as_real(outputs), layout="any"), check_tensors(as_real(inputs), layout="any")
        for output, full in zip(outputs, fulls, strict=True):
            check_size(
                "reduce_scatter", "input", full, output.numel() * self.size(), "the output times the group's size"
            )
        reduce_op, inputs = reduction(opts, fulls)
        signature = signature_of("reduce_scatter", fulls, reduce_op=reduce_op)
        return self._issue(signature, Operands(outputs, inputs), arithmetic.reduce_scatter, fulls, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def reduce_scatter_single(self, output: Tensor, full: Tensor, opts: Any = None) -> dist.Work:
        """reduce_scatter_single (reduce_scatter_tensor)."""
        return self.reduce_scatter_single_coalesced((output,), (full,), opts)

    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None, *, op: Any = None
    ) -> dist.Work:
        """reduce_scatter from a list; its tensors may differ in size."""
        outputs, parts = check_tensors(as_real(outputs)), check_tensors(as_real(check_list(inputs)))
        check_count("reduce_scatter", "input list", parts, self.size())
        check_size("reduce_scatter", "output", outputs[0], parts[self._member].numel(), "the input for this rank")
        reduce_op, inputs = reduction(opts if op is None else op, parts)
        signature = signature_of("reduce_scatter", parts, form="list", reduce_op=reduce_op)
        return self._issue(signature, Operands(outputs, inputs), arithmetic.reduce_scatter_lists, parts, opts)

    def all_to_all_single(
        self, output: Tensor, source: Tensor, output_rows: Any, input_rows: Any, opts: Any = None, timeout: Any = None
    ) -> dist.Work:
        """all_to_all_single, even or uneven along dim 0."""
        outputs, inputs = check_tensors([output]), check_tensors([source])
        outputs[0], *rows = split_exchange(outputs[0], inputs[0], output_rows, input_rows, self.size())
        signature = Signature("all_to_all", "single", "", -1, dtype_text(inputs), (tuple(source.shape[1:]),))
        return self._issue(signature, Operands(outputs, inputs, *rows), arithmetic.all_to_all_single, inputs, opts)

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        """all_to_all of lists."""
        outputs, inputs = check_tensors(outputs, layout="any"), check_tensors(inputs, layout="any")
        check_count("all_to_all", "output list", outputs, self.size())
        check_count("all_to_all", "input list", inputs, self.size())
        signature = Signature("all_to_all", "list", "", -1, dtype_text(inputs), ())
        return self._issue(signature, Operands(outputs, inputs), arithmetic.all_to_all, inputs, opts)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        """gather to the root."""
        inputs, root = check_tensors(inputs, layout="any"), root_of("gather", opts, self.size())
        gathered = check_tensors(check_list(outputs), layout="any") if root == self._member else []
        if root == self._member:
            check_count("gather", "gather_list", gathered, self.size())
        signature = signature_of("gather", inputs, form="single", root=root)
        return self._issue(signature, Operands(gathered, inputs), arithmetic.gather, inputs, opts)

    def gather_single(self, output: Tensor, shard: Tensor, opts: Any = None, timeout: Any = None) -> dist.Work:
        """gather_single (gather_into_tensor): the root's output holds the inputs of all ranks, one after the other."""
        inputs, root = check_tensors([shard]), root_of("gather", opts, self.size())
        gathered: list[Tensor] = []
        if root == self._member:
            check_size("gather", "output", output, shard.numel() * self.size(), "the input times the group's size")
            gathered = list(check_tensors([output])[0].detach().view(self.size(), *shard.shape).unbind())
        signature = signature_of("gather", inputs, form="flat", root=root)
        return self._issue(signature, Operands(gathered, inputs), arithmetic.gather, inputs, opts)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        """scatter from the root."""
        outputs, root = check_tensors(outputs), root_of("scatter", opts, self.size())
        parts = check_tensors(check_list(inputs)) if root == self._member else []
        if root == self._member:
            check_count("scatter", "scatter_list", parts, self.size())
            check_size("scatter", "output", outputs[0], parts[root].numel(), "its part")
        signature = signature_of("scatter", outputs, form="single", root=root)
        return self._issue(signature, Operands(outputs, parts), arithmetic.scatter, outputs, opts)

    def barrier(self, opts: Any = None, timeout: Any = None) -> dist.Work:
        """barrier."""
        signature = Signature("barrier", "single", "", -1, "", ())
        return self._issue(signature, Operands((), ()), arithmetic.meet, (), opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier. A rank that never issues it ends the run at once, so there is nothing to monitor."""
        opts = dist.BarrierOptions()
        opts.asyncOp = False
        self.barrier(opts)

    # point to point

    def send(self, tensors: Any, peer: int, tag: int = 0) -> Work:
        """send, isend."""
        return self._post("send", tensors, member_of("send peer", peer, self.size()), tag)

    def recv(self, tensors: Any, peer: int, tag: int = 0) -> Work:
        """recv, irecv from one rank."""
        return self._post("recv", tensors, member_of("recv peer", peer, self.size()), tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        """recv, irecv from the first rank that sends."""
        return self._post("recv", tensors, ANY, tag)

    # blocks of calls

    def start_coalescing(self, device: torch.device) -> None:
        """The calls from here on are waited for together."""
        self._batch = []

    def end_coalescing(self, device: torch.device) -> BatchedWorks:
        """The works of these calls as one."""
        works, self._batch = self._batch or [], None
        return BatchedWorks(works)

    # inside

    def _issue(
        self, signature: Signature, operands: Operands, combine: Combine, payload: Sequence[Tensor], opts: Any
    ) -> dist.Work:
        """Issue a collective, and wait for it unless it is asynchronous."""
        outputs = operands.outputs
        if outputs is not operands.inputs:
            of_one_dtype(signature.op, outputs, operands.inputs)
        is_async = getattr(opts, "asyncOp", True)
        call = RankCall(self._group, self._member, self._rank, signature, operands, outputs, combine, payload, is_async)
        self._matcher.issue(call)
        if is_async or self._batch is not None:
            return self._work(call)
        self._matcher.wait(call)
        return COMPLETE

    def _post(self, op: str, tensors: Any, peer: int, tag: int) -> Work:
        (tensor,) = check_tensors(tensors)
        caller = sys._getframe(3)  # dist.send is dist.isend and a wait
        is_async = not (caller.f_code.co_name == op and caller.f_globals is vars(c10d))
        signature = signature_of(op, (tensor,))
        outputs: tuple[Tensor, ...] = (tensor,) if op == "recv" else ()
        operands = Operands(outputs, () if outputs else (tensor,))
        own = self._group, self._member, self._rank
        call = RankCall(*own, signature, operands, outputs, arithmetic.transfer, (tensor,), is_async, peer, tag)
        self._matcher.post(call)
        return self._work(call)

    def _work(self, call: RankCall) -> Work:
        work = Work(call, self._matcher.wait, self._matcher.ask)
        if self._batch is not None:
            self._batch.append(work)
        return work
