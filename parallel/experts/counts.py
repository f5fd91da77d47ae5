"""How many rows every rank sends to every expert in a micro-batch, from integers: no rank's own choice is used.

Where `routing=` is a function the map is that. Where a router chooses it is the dense model's
(`reference.training.routing`), which the check `routing` holds against the ranks'. A rank routes the tokens that it
holds: its slices of the rows (cp), and of these an equal part in a row (tp).
"""

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from shardproof.parallel.communication.layout import Coordinates
from shardproof.parallel.communication.mesh import coordinates
from shardproof.reference.case import Case
from shardproof.reference.data.routing import first_token, forced, period
from shardproof.reference.training.routing import chosen_by_the_dense_model


def places_of(case: Case, at: Coordinates) -> Tensor:
    """The places in a row that the rank at these coordinates routes, in the order in which it holds them."""
    places = torch.arange(case.row_tokens)
    if case.sliced:
        places = torch.cat([places[run.start : run.stop] for run in case.slices[at["cp"][0]]])
    mine: Tensor = places.chunk(case.tp)[at["tp"][0]]
    return mine


def tokens_of(case: Case, at: Coordinates, step: int, micro: int) -> Tensor:
    """The numbers of the tokens that the rank at these coordinates routes, [rows, places of a row]."""
    first = first_token(case, step, micro, at["dp"][0])
    rows = torch.arange(first, first + case.tokens, case.row_tokens)[:, None]
    return rows + places_of(case, at)


def rows_sent(case: Case, block: str, step: int, micro: int, rank: int) -> tuple[int, ...]:
    """The rows that a global rank sends to each expert of the layer of this name; counted once where choices return."""
    at, known = coordinates(case, rank), _known(case)
    first, every = first_token(case, step, micro, at["dp"][0]), period(case)
    key = block, first % every if every else first, at["cp"][0], at["tp"][0]
    if key not in known:
        wanted = _chosen(case, block, step, micro, at).flatten(0, 1).sum(0)
        known[key] = tuple((wanted * 0 + case.most_rows if case.pad else wanted.clamp(max=case.most_rows)).tolist())
    return known[key]


@lru_cache(maxsize=4)
def _known(_case: Case) -> dict[tuple[str, int, int, int], tuple[int, ...]]:
    """Where the counts of the cases that were counted last are kept."""
    return {}


def micro_batches(case: Case) -> Counter[tuple[int, int]]:
    """A step and a micro-batch of every kind -> how many of the run send the same rows."""
    every, alike = period(case), dict[int, tuple[int, int]]()
    found = Counter[tuple[int, int]]()
    for step in range(case.steps):
        for micro in range(case.micro):
            first = first_token(case, step, micro, 0)
            found[alike.setdefault(first % every if every else first, (step, micro))] += 1
    return found


def _chosen(case: Case, block: str, step: int, micro: int, at: Coordinates) -> Tensor:
    """The choices for one rank's tokens, bool [rows, places of a row, experts]."""
    places = places_of(case, at)
    if case.routing == "learned" or (case.capacity_of != "rank" and case.drop == "score"):
        every = chosen_by_the_dense_model(case)[step, block]
        first = (at["dp"][0] * case.micro + micro) * case.rows
        return every[first : first + case.rows][:, places]
    if case.capacity_of == "rank":
        return forced(case, case.blocks[block], tokens_of(case, at, step, micro))
    first = first_token(case, step, micro, at["dp"][0])
    wanted_TE = forced(case, case.blocks[block], torch.arange(first, first + case.tokens))
    taken_TE = wanted_TE & (wanted_TE.cumsum(0) <= case.most_rows)
    own: Tensor = taken_TE.unflatten(0, (case.rows, case.row_tokens))[:, places]
    return own


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """Rows among the ranks that exchange tokens: `rows[t][q]` to each expert, from the rank with etp t and ep q.

    The properties below are of the rank at (`etp`, `ep`).
    """

    rows: tuple[tuple[tuple[int, ...], ...], ...]
    etp: int
    ep: int

    @property
    def local(self) -> range:
        """The experts of this ep rank."""
        share = len(self.rows[0][0]) // len(self.rows[0])
        return range(self.ep * share, (self.ep + 1) * share)

    @property
    def sent(self) -> list[int]:
        """Rows that this rank sends to every ep rank."""
        mine = self.rows[self.etp][self.ep]
        share = len(self.local)
        return [sum(mine[first : first + share]) for first in range(0, len(mine), share)]

    @property
    def received(self) -> list[int]:
        """Rows that it receives from every ep rank."""
        return self._arriving(self.etp)

    @property
    def most(self) -> int:
        """The most rows that one of the etp ranks which hold its experts receives."""
        return max(sum(self._arriving(etp)) for etp in range(len(self.rows)))

    @property
    def by_expert(self) -> list[int]:
        """Rows of each of its experts, of all etp ranks."""
        return [sum(of_q[expert] for of_t in self.rows for of_q in of_t) for expert in self.local]

    def sorted_by_expert(self) -> list[int]:
        """The places of rows in which they are sorted by expert, then by ep and etp of their source.

        They lie by etp rank, each padded to `most` rows, then by ep rank and expert.
        """
        starts: dict[tuple[int, int, int], int] = {}
        for etp, of_t in enumerate(self.rows):
            at = etp * self.most
            for ep, of_q in enumerate(of_t):
                for expert in self.local:
                    starts[expert, ep, etp] = at
                    at += of_q[expert]
        return [
            start + row
            for (expert, ep, etp), start in sorted(starts.items())
            for row in range(self.rows[etp][ep][expert])
        ]

    def _arriving(self, etp: int) -> list[int]:
        return [sum(of_q[expert] for expert in self.local) for of_q in self.rows[etp]]
