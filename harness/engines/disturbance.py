"""Applies a fault to the calls of a run: `Disturbed(engine, fault)` is an engine in which every run has that fault.

Works below the recorder, which is told what the program said. A disturbed call is computed right first, from data of
which copies were kept; then the outputs of the ranks that are hit are overwritten (`harness.engines.spoiled`). A group
fault sends the call to other ranks instead. A call is hit where it is the target's by rank, call index, op, reduce op
and group size: a program that goes another way after its first disturbed call is not hit in a call of another kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from harness.engines import spoiled
from harness.engines.arithmetic import Combine, Operands, transfer
from harness.engines.baton import Baton
from harness.engines.engine import Engine
from harness.engines.exchange import Exchange, Work
from harness.engines.intervention import Intervened, Plain
from harness.engines.meeting import Group, Meeting, Post
from harness.engines.signature import Signature
from harness.engines.spoiled import Finished
from harness.faults import Fault
from harness.ledger import Call, Observer

__all__ = ["Disturbance", "Disturbed"]


class Disturbed(Intervened):
    """An engine in which every run has the fault. Raises RequestError for an engine that takes none."""

    def __init__(self, engine: Engine, fault: Fault) -> None:
        super().__init__(engine, Disturbance(fault))


class Disturbance(Plain):
    """The intervention that makes one fault happen."""

    def __init__(self, fault: Fault) -> None:
        self._fault = fault

    def exchange(self, world_size: int, baton: Baton, observer: Observer | None) -> Exchange:
        """Calls do what the fault makes of them."""
        return _Disturbing(world_size, baton, observer, self._fault)


class _Late(NamedTuple):
    """Right values that have not arrived."""

    outputs: Sequence[Tensor]
    values: Sequence[Tensor]


class _Disturbing(Exchange):
    """An exchange in which the target's calls are disturbed."""

    def __init__(self, world_size: int, baton: Baton, observer: Observer | None, what: Fault) -> None:
        super().__init__(world_size, baton, observer)
        self._what = what
        self._targets = {call for call in what.target.calls if what.rank in {-1, call[0]}}
        self._issued = [-1] * world_size
        self._hit: dict[tuple[Group, int], set[int]] = {}
        self._receives: list[tuple[Work, Operands]] = []
        self._stale: dict[int, list[Tensor]] = {}
        self._late: dict[tuple[int, Meeting | Post], _Late] = {}
        self._arriving: list[list[_Late]] = [[] for _ in range(world_size)]
        self._said_in: dict[Group, Group] = {}
        self._regrouped = {rank: ranks for ranks in what.groups for rank in ranks}

    def issue(
        self,
        group: Group,
        member: int,
        said: Signature,
        operands: Operands,
        combine: Combine,
        payload: Sequence[Tensor],
        is_async: bool,
    ) -> Work:
        """As in any exchange; a target's call is marked, or goes to other ranks."""
        rank = group.ranks[member]
        if self._is_hit(rank, group, said):
            if self._what.kind == "group":
                group, member = self._elsewhere(rank, group, member, said)
            else:
                self._hit.setdefault((group, group.numbers[member]), set()).add(member)
        return super().issue(group, member, said, operands, combine, payload, is_async)

    def post(
        self, group: Group, member: int, said: Signature, peer: int, tag: int, tensor: Tensor, is_async: bool
    ) -> Work:
        """As in any exchange; what a target's receive gets is spoiled."""
        hit = self._is_hit(group.ranks[member], group, said)
        before = spoiled.copies([tensor]) if hit else []
        work = super().post(group, member, said, peer, tag, tensor, is_async)
        if hit:
            self._receives.append((work, Operands(before, ())))
        for receive in [receive for receive in self._receives if receive[0].event.done]:
            self._receives.remove(receive)
            received, kept = receive
            self._spoil(
                Finished(received.said, transfer, [kept], [received.outputs]), {0: received.rank}, received.event
            )
        return work

    def close(self, work: Work) -> None:
        """As in any exchange; from the first wait on, what is late may arrive at the rank's next call."""
        super().close(work)
        late = self._late.pop((work.rank, work.event), None)
        if late is not None:
            self._arriving[work.rank].append(late)

    def _is_hit(self, rank: int, group: Group, said: Signature) -> bool:
        """Count a rank's call; whether it is the target's. What is late arrives now."""
        arriving, self._arriving[rank] = self._arriving[rank], []
        for late in arriving:
            spoiled.overwrite(late.outputs, late.values)
        self._issued[rank] += 1
        target = self._what.target
        same = (said.op, said.reduce_op, len(group.ranks)) == (target.op, target.reduce_op, target.group_size)
        return same and (rank, self._issued[rank]) in self._targets

    def _elsewhere(self, rank: int, group: Group, member: int, said: Signature) -> tuple[Group, int]:
        """The group among whose ranks the call is made, and the rank's place in it."""
        ranks = self._regrouped.get(rank, group.ranks)
        if said.root >= len(ranks):
            return group, member
        other = self.group(group.life, f"{self._what}", ranks, f"{group.description}, by fault {self._what.change}")
        self._said_in[other] = group
        return other, ranks.index(rank)

    def _call(self, group: Group, said: Signature, payload: Sequence[Tensor], peer: int, is_async: bool) -> Call:
        return super()._call(self._said_in.get(group, group), said, payload, peer, is_async)

    def _complete(self, work: Work, meeting: Meeting, combine: Combine) -> None:
        hit = self._hit.pop((work.group, work.number), None)
        if hit is None:
            super()._complete(work, meeting, combine)
            return
        brought = [operands for operands in meeting.operands if operands is not None]
        with spoiled.unseen():
            kept = [spoiled.copied(operands) for operands in brought]
        super()._complete(work, meeting, combine)
        finished = Finished(meeting.said, combine, kept, [operands.outputs for operands in brought])
        self._spoil(finished, {member: work.group.ranks[member] for member in sorted(hit)}, meeting)

    def _spoil(self, finished: Finished, ranks: Mapping[int, int], event: Meeting | Post) -> None:
        """Overwrite the right outputs of these members (member -> rank)."""
        with spoiled.unseen():
            if self._what.kind == "stale":
                wrong = {member: self._stale_values(rank, finished.outputs[member]) for member, rank in ranks.items()}
            else:
                wrong = dict(enumerate(spoiled.wrong(self._what, finished)))
            if self._what.kind == "delay":
                for member, rank in ranks.items():
                    outputs = finished.outputs[member]
                    self._late[rank, event] = _Late(outputs, spoiled.copies(outputs))
        for member in ranks:
            spoiled.overwrite(finished.outputs[member], wrong[member])

    def _stale_values(self, rank: int, outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """What the target's call before gave; the first one stays right, or gives zeros where there is no second."""
        right = spoiled.copies(outputs)
        first = list(map(torch.zeros_like, right)) if self._what.target.once else right
        before = self._stale.get(rank, first)
        self._stale[rank] = right
        return before if [value.shape for value in before] == [value.shape for value in right] else right
