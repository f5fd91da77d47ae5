"""What the ranks of one run say over their connections: how they ended, where they stand, which calls they issued.

An answer begins with the number of its run, so that what comes late from a run that was given up is not heard. Times
are seconds.
"""

from __future__ import annotations

import pickle
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from multiprocessing.connection import Connection, wait

from harness.engines.processes.exit_status import Ending, ending, vanished
from harness.engines.processes.flight_recorder import Fact
from harness.engines.processes.launched.agent import DIED
from harness.engines.processes.launched.rank_child import NUMBER_BYTES, Answer, Order
from harness.engines.processes.rank_program import Ended

__all__ = ["Answers", "HeardBoard"]

_LISTEN_S = 0.2
"""How often a wait looks up, to see that the world is being terminated."""
_PEER_GONE = re.compile(r"closed by peer|reset by peer|Broken pipe|Connection refused|remote (?:error|process)", re.I)
_GONE = vanished("its launched process is gone")


class HeardBoard:
    """The board of a rank elsewhere, as far as it has told what is on it (trace_matcher.Board)."""

    def __init__(self) -> None:
        self._calls: list[tuple[float, Fact]] = []
        self._inside = False
        self._waits = 0

    def hear(self, answer: Answer) -> None:
        """Take in what an answer tells."""
        self._calls += answer.calls
        self._inside, self._waits = answer.inside, answer.waits

    def new(self) -> Iterator[tuple[float, Fact]]:
        """The calls told since the last time: when, and what."""
        calls, self._calls = self._calls, []
        yield from calls

    def inside(self) -> bool:
        """Whether the call told last is a synchronous one that is not known to be complete."""
        return self._inside

    def waits(self) -> int:
        """1 + the place, among the asynchronous calls, of the one for which the rank waits; 0 for none."""
        return self._waits


class Answers:
    """What the ranks of run `number` have said so far; `terminated` says whether the launcher is ending the world."""

    def __init__(self, number: int, links: Mapping[int, Connection], terminated: Callable[[], bool]) -> None:
        self._links = dict(links)
        self._number = number.to_bytes(NUMBER_BYTES, "big")
        self._terminated = terminated
        self._places: dict[int, Answer] = {}
        self._arrived: list[Ended] = []
        self._unwaited: dict[int, tuple[int, ...]] = {}
        self.boards = [HeardBoard() for _ in links]
        self.died: dict[int, Ending] = {}
        self.refused = self.broken = ""

    @property
    def ranks(self) -> range:
        """All ranks of the run."""
        return range(len(self._links))

    @property
    def ended(self) -> dict[int, Ended]:
        """How ranks ended, by rank."""
        return {ended.rank: ended for ended in sorted(self._arrived, key=lambda ended: ended.rank)}

    @property
    def raised(self) -> list[Ended]:
        """Ranks that raised: in the order of arrival, but those that only say that a peer is gone last."""
        found = [ended for ended in self._arrived if ended.error is not None]
        return sorted(found, key=lambda ended: bool(_PEER_GONE.search(ended.detail)))

    @property
    def pending(self) -> list[int]:
        """The ranks that neither ended nor died."""
        ended = {ended.rank for ended in self._arrived}
        return [rank for rank in self.ranks if rank not in ended and rank not in self.died]

    @property
    def failed(self) -> bool:
        """Whether anything went wrong that ends the run."""
        return bool(self.died or self.refused or self.broken or self.raised) or self._terminated()

    @property
    def unwaited(self) -> list[tuple[int, ...]]:
        """By rank, the places among its asynchronous calls of those that nobody waited for."""
        return [self._unwaited.get(rank, ()) for rank in self.ranks]

    def asked(self) -> bool:
        """Whether every rank that is pending has said where it stands since it was last asked."""
        return all(rank in self._places for rank in self.pending)

    def waits(self, rank: int) -> bool:
        """Whether the rank said that it stands where one waits for a call."""
        return rank in self._places and self._places[rank].in_wait

    def caller(self, rank: int) -> str:
        """The line of the user's code at which the rank said it stands."""
        return self._places[rank].caller if rank in self._places else ""

    def ask(self, kind: bytes, limit_s: float) -> None:
        """Ask those who are pending where they stand."""
        self._places.clear()
        self.order(kind, self.pending)
        self.listen(time.monotonic() + limit_s, self.asked)

    def order(self, kind: bytes, ranks: Iterable[int], order: Order | None = None) -> None:
        """Tell these ranks: an order, or the number of the run."""
        message = kind + (self._number if order is None else pickle.dumps(order))
        for rank in ranks:
            try:
                self._links[rank].send_bytes(message)
            except OSError:
                self.died.setdefault(rank, _GONE)

    def listen(self, end_s: float, enough: Callable[[], bool]) -> None:
        """Hear the ranks until it is enough, all have ended, or the time has come."""
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
            self.died[rank] = ending(int(said[1:]))
        elif said[1 : 1 + NUMBER_BYTES] == self._number:
            self._take(rank, pickle.loads(said[1 + NUMBER_BYTES :]))

    def _take(self, rank: int, answer: Answer) -> None:
        self.boards[rank].hear(answer)
        self.refused = self.refused or answer.refused
        self.broken = self.broken or answer.broken
        if answer.ended is None:
            self._places[rank] = answer
        else:
            self._arrived.append(answer.ended)
            self._unwaited[rank] = answer.unwaited
