"""Applies a fault to the calls of a run: `Disturbed(engine, fault)` is an engine in which every run has that fault.

Works below the recorder, which records the call as the program issued it. A disturbed call is computed correctly first,
from data of which copies were kept. Then the outputs of the ranks that are hit are overwritten (`faults.spoiled`). A
group fault sends the call to other ranks instead. A call is hit where it is the target's by rank, call index, op,
reduce op and group size. So a program that then goes another way is not hit in a call of another kind.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardproof.harness.engines.calls.arithmetic import Operands, transfer
from shardproof.harness.engines.calls.pending import PendingCollective, PendingMessage, RankGroup
from shardproof.harness.engines.engine import Engine
from shardproof.harness.engines.faults import spoiled
from shardproof.harness.engines.faults.spoiled import CompletedCall
from shardproof.harness.engines.threads.intervention import Intervened, Intervention
from shardproof.harness.engines.threads.matcher import CollectiveMatcher
from shardproof.harness.engines.threads.scheduler import Scheduler
from shardproof.harness.engines.threads.work import RankCall
from shardproof.harness.faults import Fault, RankCallIndex
from shardproof.harness.ledger import Call, Observer
from shardproof.harness.outcome.merging import bits_of
from shardproof.harness.torch_internals.modes import unseen


class Disturbed(Intervened):
    """An engine in which every run has the fault. Raises RequestError for an engine that takes none."""

    def __init__(self, engine: Engine, fault: Fault) -> None:
        super().__init__(engine, Disturbance(fault))


class Disturbance(Intervention):
    """The intervention that makes one fault happen; None changes nothing.

    `delivered`, of the last run: (rank, call index) -> digest of what the call left in the rank's outputs. Two runs
    that delivered the same are, since ranks are deterministic, the same run.
    """

    def __init__(self, fault: Fault | None) -> None:
        self._fault = fault
        self.delivered: Mapping[RankCallIndex, bytes] = {}

    def matcher(self, world_size: int, scheduler: Scheduler, observer: Observer | None) -> CollectiveMatcher:
        """Calls are computed as the fault has it."""
        made = _Disturbing(world_size, scheduler, observer, self._fault)
        self.delivered = made.delivered
        return made


class _Late(NamedTuple):
    """Right values that have not arrived."""

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
        before = spoiled.copies(call.payload) if place in self._hit else []
        super().post(call)
        if call.signature.op == "recv":
            self._receives.append((call, place, before))
        for received in [receive for receive in self._receives if receive[0].event.done]:
            self._receives.remove(received)
            complete, place, before = received
            finished = CompletedCall(complete.signature, transfer, [Operands(before, ())], [complete.outputs])
            self._deliver(finished, {0: place}, complete.event)

    def close(self, call: RankCall) -> None:
        """As in the base class; from the first wait on, what is late may arrive at the rank's next call."""
        super().close(call)
        late = self._late.pop((call.rank, call.event), None)
        if late is not None:
            self._arriving[call.rank].append(late)

    def _next(self, call: RankCall) -> RankCallIndex:
        """Count a rank's call, and mark it when it is the target's. Late results arrive now."""
        rank, signature = call.rank, call.signature
        arriving, self._arriving[rank] = self._arriving[rank], []
        for late in arriving:
            spoiled.overwrite(late.outputs, late.values)
        self._issued[rank] += 1
        place = rank, self._issued[rank]
        if self._what is not None and place in self._targets:
            target, kind = self._what.target, (signature.op, signature.reduce_op, len(call.group.ranks))
            if kind == (target.op, target.reduce_op, target.group_size):
                self._hit.add(place)
        return place

    def _regroup(self, call: RankCall) -> None:
        """Issue the call in the fault's group in place of its own."""
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
        with unseen():
            kept = [] if self._hit.isdisjoint(places.values()) else list(map(spoiled.copied, brought))
        super()._complete(call, collective)
        outputs = [each.outputs for each in brought]
        self._deliver(CompletedCall(collective.signature, call.combine, kept, outputs), places, collective)

    def _deliver(
        self, finished: CompletedCall, places: Mapping[int, RankCallIndex], event: PendingCollective | PendingMessage
    ) -> None:
        """Overwrite the right outputs of the members that are hit; note what every member got (member -> place)."""
        with unseen():
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
        right = {member: spoiled.copies(finished.outputs[member]) for member in ranks}
        if what.kind == "stale":
            values = {member: self._before(what, rank, right[member]) for member, rank in ranks.items()}
        else:
            values = dict(enumerate(spoiled.wrong(what, finished)))
        for member, rank in ranks.items():
            if what.kind == "delay":
                self._late[rank, event] = _Late(finished.outputs[member], right[member])
            spoiled.overwrite(finished.outputs[member], values[member])

    def _before(self, what: Fault, rank: int, right: list[Tensor]) -> Sequence[Tensor]:
        """Result of the target's call before; the first one stays right, or gives zeros where there is no second."""
        first = list(map(torch.zeros_like, right)) if what.target.once else right
        before = self._stale.get(rank, first)
        self._stale[rank] = right
        return before if [value.shape for value in before] == [value.shape for value in right] else right
