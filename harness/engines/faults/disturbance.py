"""Applies a fault to the calls of every run of the engine `Intervened(engine, Disturbance(fault))`.

Works below the recorder, which records the call as the program issued it. The operands of a disturbed call are copied,
and the call is computed correctly. Then the outputs of the ranks that are hit are overwritten with values made from
the copies by the kind of the fault (`harness.faults`). A fault of the group sends the call to other ranks instead.
A call is hit if it agrees with the target in rank, call index, op, reduce op and group size. So a program that takes
another path after the fault is not hit in a call of another kind.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardproof.harness.engines.calls import arithmetic
from shardproof.harness.engines.calls.arithmetic import Combine, Operands, transfer
from shardproof.harness.engines.calls.pending import PendingCollective, PendingMessage, RankGroup
from shardproof.harness.engines.calls.signature import Signature
from shardproof.harness.engines.threads.inproc import Intervention
from shardproof.harness.engines.threads.matcher import CollectiveMatcher, RankCall
from shardproof.harness.engines.threads.scheduler import Scheduler
from shardproof.harness.faults import Fault, RankCallIndex
from shardproof.harness.ledger import Call, Observer
from shardproof.harness.outcome.merging import bits_of
from shardproof.harness.torch_internals.autograd import without_version
from shardproof.harness.torch_internals.dispatch import hide_from_modes


class CompletedCall(NamedTuple):
    """A call that is complete, by group rank: copies of the operands (outputs as they were before), and the outputs,
    which hold the right values. A message has only its receiver here.
    """

    signature: Signature
    combine: Combine
    kept: Sequence[Operands]
    outputs: Sequence[Sequence[Tensor]]


def spoil_outputs(what: Fault, done: CompletedCall) -> list[Sequence[Tensor]]:
    """By group rank, the outputs that a fault of this kind leaves. Not for the kinds group and stale, which depend on
    other calls.
    """
    if what.kind in {"drop", "delay"}:
        alone, size = _ALONE.get(done.combine, lambda mine, _member, _size: list(mine.outputs)), len(done.kept)
        return [alone(mine, member, size) for member, mine in enumerate(done.kept)]
    if what.kind == "poison":
        return [[poison_like(tensor) for tensor in outputs] for outputs in done.outputs]
    if what.kind == "op":
        return _made_again([copy_operands(mine) for mine in done.kept], done, what.change)
    return _double_outputs(done)


def copy_tensors(tensors: Sequence[Tensor]) -> list[Tensor]:
    """New tensors with the same numbers and strides."""
    return [tensor.clone() for tensor in tensors]


def copy_operands(brought: Operands) -> Operands:
    """Copies of a rank's operands; outputs that are inputs stay so."""
    outputs = copy_tensors(brought.outputs)
    inputs = outputs if brought.inputs is brought.outputs else copy_tensors(brought.inputs)
    return brought._replace(outputs=outputs, inputs=inputs)


def overwrite_tensors(outputs: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Write values of the same sizes, without counting as another change of the tensors for autograd."""
    with hide_from_modes(), without_version(tuple(outputs)):
        for output, value in zip(outputs, values, strict=True):
            output.copy_(value.reshape(output.shape))


def poison_like(tensor: Tensor) -> Tensor:
    """A value that cannot be taken for a result."""
    if tensor.dtype is torch.bool:
        return ~tensor
    if tensor.is_floating_point() or tensor.is_complex():
        return torch.full_like(tensor, float("nan"))
    return torch.full_like(tensor, torch.iinfo(tensor.dtype).max)


def _double_outputs(done: CompletedCall) -> list[Sequence[Tensor]]:
    """Outputs by rank: of a call in place, or of an exchange whose shapes allow it, those of the call made again on its
    result. Otherwise the result of a sum, an average or an exchange counts twice, and other results stay.
    """
    in_place, exchanges = done.combine in _IN_PLACE, done.combine in _EXCHANGES
    if in_place or (exchanges and all(map(_is_repeatable, done.kept))):
        again = []
        for mine, outputs in zip(done.kept, done.outputs, strict=True):
            results = copy_tensors(outputs)
            again.append(mine._replace(outputs=results if in_place else copy_tensors(results), inputs=results))
        return _made_again(again, done, done.signature.reduce_op)
    counts_twice = exchanges or done.signature.reduce_op in {"sum", "avg", "premul_sum"}
    return [[output + output if counts_twice else output for output in outputs] for outputs in done.outputs]


def _made_again(members: Sequence[Operands], done: CompletedCall, reduce_op: str) -> list[Sequence[Tensor]]:
    done.combine(members, reduce_op, done.signature.root)
    return [operands.outputs for operands in members]


_IN_PLACE = (arithmetic.all_reduce, arithmetic.reduce, arithmetic.broadcast)
_EXCHANGES = (arithmetic.all_to_all, arithmetic.all_to_all_single)


def _is_repeatable(mine: Operands) -> bool:
    """Whether the outputs of an exchange could be its inputs."""
    shapes = [tensor.shape for tensor in mine.outputs], [tensor.shape for tensor in mine.inputs]
    return shapes[0] == shapes[1] and mine.output_rows == mine.input_rows


def _list_outputs(mine: Operands, member: int, size: int) -> list[Tensor]:
    return [_fit_to_output(mine.inputs[i % len(mine.inputs)], output) for i, output in enumerate(mine.outputs)]


def _handed_out(mine: Operands, member: int, size: int) -> list[Tensor]:
    return [mine.inputs[member]] if mine.inputs else list(mine.outputs)


def _swapped_rows(mine: Operands, member: int, size: int) -> list[Tensor]:
    own = mine.inputs[0].split(list(mine.input_rows))[member]
    blocks = mine.outputs[0].split(list(mine.output_rows))
    return [torch.cat([_fit_to_output(own, block) for block in blocks])]


def _fit_to_output(value: Tensor, output: Tensor) -> Tensor:
    """The value if it has the output's size, else zeros."""
    return value.reshape(output.shape) if value.numel() == output.numel() else torch.zeros_like(output)


_ALONE: dict[Combine, Callable[[Operands, int, int], list[Tensor]]] = {
    arithmetic.all_gather: lambda mine, _member, size: [torch.cat([t.reshape(-1)] * size) for t in mine.inputs],
    arithmetic.all_gather_lists: _list_outputs,
    arithmetic.gather: _list_outputs,
    arithmetic.reduce_scatter: lambda mine, member, size: [t.reshape(size, -1)[member] for t in mine.inputs],
    arithmetic.reduce_scatter_lists: _handed_out,
    arithmetic.scatter: _handed_out,
    arithmetic.all_to_all: lambda mine, member, _size: [
        _fit_to_output(mine.inputs[member], out) for out in mine.outputs
    ],
    arithmetic.all_to_all_single: _swapped_rows,
}
"""What a rank's outputs would be without the other ranks. For ops not named here it is what the outputs were before."""


class Disturbance(Intervention):
    """The intervention that makes one fault happen; None changes nothing.

    `delivered`, of the last run: (rank, call index) -> a digest of what the call left in the rank's outputs. Ranks are
    deterministic, so two runs that delivered the same are the same run.
    """

    def __init__(self, fault: Fault | None) -> None:
        self._fault = fault
        self.delivered: Mapping[RankCallIndex, bytes] = {}

    def matcher(self, world_size: int, scheduler: Scheduler, observer: Observer | None) -> CollectiveMatcher:
        """Computes calls as the fault says."""
        made = _Disturbing(world_size, scheduler, observer, self._fault)
        self.delivered = made.delivered
        return made


class _Late(NamedTuple):
    """Right values that arrive late."""

    outputs: Sequence[Tensor]
    values: Sequence[Tensor]


class _Disturbing(CollectiveMatcher):
    """A matcher in which the target's calls are disturbed."""

    def __init__(self, world_size: int, scheduler: Scheduler, observer: Observer | None, what: Fault | None) -> None:
        super().__init__(world_size, scheduler, observer)
        self.delivered: dict[RankCallIndex, bytes] = {}
        self._what = what
        self._targets = what.places if what else frozenset()
        self._regrouped = {rank: ranks for ranks in what.groups for rank in ranks} if what else {}
        self._issued = [-1] * world_size
        self._places: dict[tuple[RankGroup, int], dict[int, RankCallIndex]] = {}
        self._receives: list[tuple[RankCall, RankCallIndex, list[Tensor]]] = []
        self._hit: set[RankCallIndex] = set()
        self._stale: dict[int, list[Tensor]] = {}
        self._late: dict[tuple[int, PendingCollective | PendingMessage], _Late] = {}
        self._arriving: list[list[_Late]] = [[] for _ in range(world_size)]
        self._replaced: dict[RankGroup, RankGroup] = {}

    def issue(self, call: RankCall) -> None:
        """As in the base class; a target's call is marked, or goes to other ranks."""
        place = self._next(call)
        if place in self._hit and self._regrouped:
            self._hit.remove(place)
            self._regroup(call)
        self._places.setdefault((call.group, call.group.numbers[call.member]), {})[call.member] = place
        super().issue(call)

    def post(self, call: RankCall) -> None:
        """As in the base class; what a target's receive gets is spoiled."""
        place = self._next(call)
        before = copy_tensors(call.payload) if place in self._hit else []
        super().post(call)
        if call.signature.op == "recv":
            self._receives.append((call, place, before))
        for received in [receive for receive in self._receives if receive[0].event.done]:
            self._receives.remove(received)
            complete, place, before = received
            finished = CompletedCall(complete.signature, transfer, [Operands(before, ())], [complete.outputs])
            self._deliver(finished, {0: place}, complete.event)

    def close(self, call: RankCall) -> None:
        """As in the base class; after the first wait of a call, its late values arrive at the rank's next call."""
        super().close(call)
        late = self._late.pop((call.rank, call.event), None)
        if late is not None:
            self._arriving[call.rank].append(late)

    def _next(self, call: RankCall) -> RankCallIndex:
        """Count a rank's call, and mark it if it is the target's. Late results arrive now."""
        rank, signature = call.rank, call.signature
        arriving, self._arriving[rank] = self._arriving[rank], []
        for late in arriving:
            overwrite_tensors(late.outputs, late.values)
        self._issued[rank] += 1
        place = rank, self._issued[rank]
        if self._what is not None and place in self._targets:
            target, kind = self._what.target, (signature.op, signature.reduce_op, len(call.group.ranks))
            if kind == (target.op, target.reduce_op, target.group_size):
                self._hit.add(place)
        return place

    def _regroup(self, call: RankCall) -> None:
        """Issue the call in the fault's group instead of its own."""
        ranks, group = self._regrouped.get(call.rank, call.group.ranks), call.group
        if self._what is None or call.signature.root >= len(ranks):
            return
        call.group = self.group(
            group.life, str(self._what), ranks, f"{group.description}, by fault {self._what.change}"
        )
        call.member = ranks.index(call.rank)
        self._replaced[call.group] = group

    def _ledger_call(self, call: RankCall, group: RankGroup, peer: int) -> Call:
        return super()._ledger_call(call, self._replaced.get(group, group), peer)

    def _complete(self, call: RankCall, collective: PendingCollective) -> None:
        places = self._places.pop((call.group, call.number))
        brought = [operands for operands in collective.issued if operands is not None]
        with hide_from_modes():
            kept = [] if self._hit.isdisjoint(places.values()) else list(map(copy_operands, brought))
        super()._complete(call, collective)
        outputs = [each.outputs for each in brought]
        self._deliver(CompletedCall(collective.signature, call.combine, kept, outputs), places, collective)

    def _deliver(
        self, finished: CompletedCall, places: Mapping[int, RankCallIndex], event: PendingCollective | PendingMessage
    ) -> None:
        """Overwrite the right outputs of the members that are hit; record what every member got (member -> place)."""
        with hide_from_modes():
            hit = [member for member in places if places[member] in self._hit]
            if hit and self._what is not None:
                self._spoil(self._what, finished, {member: places[member][0] for member in hit}, event)
            for member, place in places.items():
                digest = hashlib.blake2b(digest_size=16)
                for tensor in finished.outputs[member]:
                    if not tensor.is_meta:
                        digest.update(bits_of(tensor.cpu()).numpy().tobytes())
                self.delivered[place] = digest.digest()

    def _spoil(
        self, what: Fault, finished: CompletedCall, ranks: Mapping[int, int], event: PendingCollective | PendingMessage
    ) -> None:
        """Overwrite the right outputs of these members (member -> rank)."""
        right = {member: copy_tensors(finished.outputs[member]) for member in ranks}
        if what.kind == "stale":
            values = {member: self._before(what, rank, right[member]) for member, rank in ranks.items()}
        else:
            values = dict(enumerate(spoil_outputs(what, finished)))
        for member, rank in ranks.items():
            if what.kind == "delay":
                self._late[rank, event] = _Late(finished.outputs[member], right[member])
            overwrite_tensors(finished.outputs[member], values[member])

    def _before(self, what: Fault, rank: int, right: list[Tensor]) -> Sequence[Tensor]:
        """The right result of the rank's previous call that was hit, if it has this shape. The first one has none:
        it stays right, or gives zeros if the target is called once.
        """
        first = list(map(torch.zeros_like, right)) if what.target.once else right
        before = self._stale.get(rank, first)
        self._stale[rank] = right
        return before if [value.shape for value in before] == [value.shape for value in right] else right
