"""One run on ranks that answer over connections: order, wait, and turn what came back into results or one error.

The root cause is told first: a process that died before an exception, and an exception of the program before one that
only says that a peer is gone. A rank that does not end by the time limit, or soon after another one failed, is asked
where it stands and its child process is ended. Times are seconds.
"""

from __future__ import annotations

import pickle
import re
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.connection import Connection, wait

from harness.engines.rank_child import NUMBER_BYTES, Order
from harness.engines.rank_process import Ended
from harness.engines.relay import DIED, KILL, LEAVE, RUN, START, WHERE
from harness.errors import Position, RankDied, RankRaised, ShardproofError, TimeLimit

__all__ = ["Answers", "collected"]

_START_S = 60.0
"""How long a child may take to start: it imports torch, beside all others."""
_SETTLE_S = 0.1
"""How long the others may go on after one has failed, until they are asked where they stand."""
_GRACE_S = 0.5
"""How long they may take to end after that; then their processes are ended."""
_ASK_S = 1.0
"""How long a rank that is stuck may take to say where."""
_LISTEN_S = 0.2
"""How often a wait looks up, to see that the world is being terminated."""
_PEER_GONE = re.compile(r"closed by peer|reset by peer|Broken pipe|Connection refused|remote (?:error|process)", re.I)
_GONE = "its launched process is gone"


class Answers:
    """What the ranks of one run have said so far; `terminated` says whether the launcher is ending the world."""

    def __init__(self, number: int, links: Mapping[int, Connection], terminated: Callable[[], bool]) -> None:
        self._links = dict(links)
        self._number = number.to_bytes(NUMBER_BYTES, "big")
        self._terminated = terminated
        self.ended: dict[int, Ended] = {}
        self.died: dict[int, str] = {}
        self.places: dict[int, Position] = {}

    @property
    def ranks(self) -> range:
        """All ranks of the run."""
        return range(len(self._links))

    @property
    def pending(self) -> list[int]:
        """The ranks that neither ended nor died."""
        return [rank for rank in self.ranks if rank not in self.ended and rank not in self.died]

    @property
    def failed(self) -> bool:
        """Whether anything went wrong that ends the run."""
        return bool(self.died) or self._terminated() or any(ended.error is not None for ended in self.ended.values())

    def placed(self) -> bool:
        """Whether every rank that is pending has said where it stands."""
        return all(rank in self.places for rank in self.pending)

    def order(self, kind: bytes, ranks: Iterable[int], payload: bytes | None = None) -> None:
        """Tell these ranks; without a payload, the number of the run."""
        for rank in ranks:
            try:
                self._links[rank].send_bytes(kind + (self._number if payload is None else payload))
            except OSError:
                self.died[rank] = _GONE

    def listen(self, end_s: float, enough: Callable[[], bool]) -> None:
        """Hear the ranks until it is enough or the time has come."""
        while self.pending and not enough():
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                return
            links = {self._links[rank]: rank for rank in self.pending}
            for link in wait(list(links), min(left_s, _LISTEN_S)):
                self._hear(links[link])  # type: ignore[index]

    def _hear(self, rank: int) -> None:
        try:
            said = self._links[rank].recv_bytes()
        except (EOFError, OSError):
            self.died[rank] = _GONE
            return
        if said[:1] == DIED:
            self.died[rank] = _status_text(int(said[1:]))
        elif said[1 : 1 + NUMBER_BYTES] == self._number:  # else of a run that was given up
            answer: Ended | Position = pickle.loads(said[1 + NUMBER_BYTES :])
            if isinstance(answer, Ended):
                self.ended[rank] = answer
            else:
                self.places[rank] = answer


def collected(answers: Answers, order: Order) -> list[object]:
    """The values by rank. Raises RankRaised, RankDied or TimeLimit; ranks that are stuck have been ended by then."""
    answers.order(START, answers.ranks)
    answers.listen(time.monotonic() + _START_S, answers.placed)
    if answers.placed() and not answers.failed:
        answers.order(RUN, answers.ranks, pickle.dumps(order))
        answers.places.clear()
    answers.listen(time.monotonic() + order.timeout_s, lambda: answers.failed)
    if not answers.pending and not answers.failed:
        answers.order(LEAVE, answers.ranks)
        return [answers.ended[rank].value for rank in answers.ranks]
    answers.listen(time.monotonic() + _SETTLE_S, lambda: False)  # the root cause may be told second
    stuck = answers.pending
    answers.order(WHERE, stuck)
    answers.listen(time.monotonic() + _ASK_S, answers.placed)
    error, cause = _error(answers, order, stuck)
    answers.order(LEAVE, answers.ranks)  # those who wait for a rank that has left learn that its end is gone
    answers.listen(time.monotonic() + _GRACE_S, lambda: False)
    answers.order(KILL, answers.pending)
    raise error from cause


def _error(answers: Answers, order: Order, stuck: list[int]) -> tuple[ShardproofError, BaseException | None]:
    positions = [_position(answers, rank) for rank in answers.ranks]
    raised = [rank for rank, ended in answers.ended.items() if ended.error is not None]  # in the order of arrival
    first = next((rank for rank in raised if not _PEER_GONE.search(answers.ended[rank].detail)), None)
    if answers.died:
        rank, how = next(iter(answers.died.items()))
        text = f"rank {rank} of {order.world_size} died: {how}"
        return RankDied(text, ranks=tuple(answers.died), positions=positions), None
    if raised:
        rank = raised[0] if first is None else first
        ended = answers.ended[rank]
        text = f"rank {rank} of {order.world_size} raised {ended.detail}" + (
            f", at {ended.caller}" * bool(ended.caller)
        )
        ranks = (rank, *(other for other in raised if other != rank))
        return RankRaised(text, ranks=ranks, positions=positions), ended.error
    if answers.failed:
        text = "the launcher ends this world (SIGTERM): one of its processes ended, or the job was stopped"
        return RankDied(text, ranks=stuck, positions=positions), None
    where = ", ".join(str(positions[rank]) for rank in stuck)
    text = f"no end within {order.timeout_s:g} s: {where or 'every rank was about to end'}"
    return TimeLimit(text, ranks=stuck, positions=positions), None


def _position(answers: Answers, rank: int) -> Position:
    if rank in answers.died:
        return Position(rank=rank, state=f"died ({answers.died[rank]})")
    ended = answers.ended.get(rank)
    if ended is None:
        return answers.places.get(rank, Position(rank=rank, state="runs"))
    if ended.error is None:
        return Position(rank=rank, state="finished")
    return Position(rank=rank, state="raised", detail=ended.detail, caller=ended.caller)


def _status_text(status: int) -> str:
    """How a process ended, in words."""
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"its process ended with status {status}"
