"""How many rows every rank sends to every expert in a micro-batch, from integers, and the calls that follow.

The choices are never taken from the ranks. If `routing=` is a function, it gives the choices. If a router chooses, they
are those of the dense model (`reference.training.truth`), with which the check `routing` compares the ranks' choices. A
rank routes the tokens that it holds: an equal part (tp) of its slice (cp) of each row.

Payloads of the calls differ by rank, since they follow the choices. `sent` and `received` are the numbers of rows of
one rank. `most` is the largest number that one of the etp ranks with its experts receives. Rows that are sent in
forward return in backward.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from shardproof.parallel.communication.expectation import ACTIVATION, CallPlace, CallRow, in_modules
from shardproof.parallel.communication.layout import Coordinates, coordinates
from shardproof.parallel.communication.schedules import Stage, stages, stages_at
from shardproof.reference.case import Case
from shardproof.reference.data.routing import first_token, forced_experts, period
from shardproof.reference.training.truth import dense_router_choices


def places_of(case: Case, at: Coordinates) -> Tensor:
    """The places in a row that the rank at these coordinates routes, in the order in which it holds them."""
    places = torch.arange(case.row_tokens)
    if case.is_sliced:
        places = torch.cat([places[run.start : run.stop] for run in case.slices[at["cp"][0]]])
    mine: Tensor = places.chunk(case.tp)[at["tp"][0]]
    return mine


def tokens_of(case: Case, at: Coordinates, step: int, micro: int) -> Tensor:
    """The numbers of the tokens that the rank at these coordinates routes, [rows, places of a row]."""
    first = first_token(case, step, micro, at["dp"][0])
    rows = torch.arange(first, first + case.tokens, case.row_tokens)[:, None]
    return rows + places_of(case, at)


def rows_sent(case: Case, block: str, step: int, micro: int, rank: int) -> tuple[int, ...]:
    """The number of rows that a global rank sends to each expert of the layer of this name."""
    at, known = coordinates(case, rank), _latest_counts(case)
    first, every = first_token(case, step, micro, at["dp"][0]), period(case)
    key = block, first % every if every else first, at["cp"][0], at["tp"][0]
    if key not in known:
        wanted = _choices_of_rank(case, block, step, micro, at).flatten(0, 1).sum(0)
        known[key] = tuple((wanted * 0 + case.most_rows if case.pad else wanted.clamp(max=case.most_rows)).tolist())
    return known[key]


@lru_cache(maxsize=4)
def _latest_counts(_case: Case) -> dict[tuple[str, int, int, int], tuple[int, ...]]:
    """A cache of a case's counts, since the same choices repeat in many micro-batches."""
    return {}


def micro_batches(case: Case) -> Counter[tuple[int, int]]:
    """(step, micro-batch) of the first of every kind -> how many of the run's micro-batches send the same rows."""
    every, alike = period(case), dict[int, tuple[int, int]]()
    found = Counter[tuple[int, int]]()
    for step in range(case.steps):
        for micro in range(case.micro):
            first = first_token(case, step, micro, 0)
            found[alike.setdefault(first % every if every else first, (step, micro))] += 1
    return found


def _choices_of_rank(case: Case, block: str, step: int, micro: int, at: Coordinates) -> Tensor:
    """The choices for one rank's tokens, bool [rows, places of a row, experts]."""
    places = places_of(case, at)
    if case.routing == "learned" or (case.capacity_of != "rank" and case.drop == "score"):
        every = dense_router_choices(case)[step, block]
        first = (at["dp"][0] * case.micro + micro) * case.rows
        return every[first : first + case.rows][:, places]
    if case.capacity_of == "rank":
        return forced_experts(case, case.blocks[block], tokens_of(case, at, step, micro))
    first = first_token(case, step, micro, at["dp"][0])
    wanted_TE = forced_experts(case, case.blocks[block], torch.arange(first, first + case.tokens))
    taken_TE = wanted_TE & (wanted_TE.cumsum(0) <= case.most_rows)
    own: Tensor = taken_TE.unflatten(0, (case.rows, case.row_tokens))[:, places]
    return own


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCounts:
    """Numbers of rows that ranks send to each expert: `rows[t][q]` are those of the rank at place t of etp, q of ep.

    The properties below are those of the rank at (`etp`, `ep`).
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
    def rows_to_send(self) -> list[int]:
        """Rows that this rank sends to every ep rank."""
        mine = self.rows[self.etp][self.ep]
        share = len(self.local)
        return [sum(mine[first : first + share]) for first in range(0, len(mine), share)]

    @property
    def rows_to_receive(self) -> list[int]:
        """Rows that it receives from every ep rank."""
        return self._rows_arriving(self.etp)

    @property
    def most(self) -> int:
        """The largest number of rows that one of the etp ranks of its experts receives."""
        return max(sum(self._rows_arriving(etp)) for etp in range(len(self.rows)))

    @property
    def by_expert(self) -> list[int]:
        """The rows of each of its experts, those of all etp ranks."""
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

    def _rows_arriving(self, etp: int) -> list[int]:
        return [sum(of_q[expert] for expert in self.local) for of_q in self.rows[etp]]


_OWN = "slice_tokens // tp"
"""Tokens of one rank."""


def rows_of_experts(case: Case) -> tuple[CallRow, ...]:
    """The calls of the case's layers with experts, without those of shared experts, which are plain linears."""
    router = case.dtype if case.router_dtype == "model" else case.router_dtype
    dispatched = _gather_rows(router) if case.dispatcher == "allgather" else _exchange_rows(router)
    return (
        *_around(case),
        *_capacity_rows(case, router),
        *dispatched,
        *(row for row in BALANCE if getattr(case, row.when)),
    )


def _around(case: Case) -> Iterator[CallRow]:
    """The calls around all experts where hidden states are whole."""
    if not case.system.sequence:
        yield CallRow(_layers, "forward", "all_gather", ACTIVATION, "outputs of the tokens of all tensor ranks")
        yield CallRow(_layers, "backward", "all_gather", ACTIVATION, "gradients of the tokens of all tensor ranks")


def _capacity_rows(case: Case, router: str) -> Iterator[CallRow]:
    """The calls that let tokens of several ranks compete for an expert."""
    if case.capacity_of != "rank":
        elements, dtype = f"ranks * {_OWN} * experts", router if case.drop == "score" else "bool"
        yield CallRow(_layers, "forward", "all_gather", elements, "who competes for whom", axis="tp_cp", dtype=dtype)


def _gather_rows(router: str) -> Iterator[CallRow]:
    choices, hidden = f"ranks * {_OWN} * experts", f"ranks * {_OWN} * hidden"
    for phase, op, elements, why, dtype in (
        ("forward", "all_gather", choices, "who chose whom", "bool"),
        ("forward", "all_gather", choices, "weights of experts", router),
        ("forward", "all_gather", hidden, "tokens of all ranks", ""),
        ("forward", "reduce_scatter", hidden, "sums over the experts of all ranks", ""),
        ("backward", "all_gather", hidden, "gradients of the sums", ""),
        ("backward", "reduce_scatter", hidden, "gradients of tokens", ""),
        ("backward", "reduce_scatter", choices, "gradients of weights", router),
    ):
        yield CallRow(_layers, phase, op, elements, why, axis="etp_ep", dtype=dtype)


def _exchange_rows(router: str) -> Iterator[CallRow]:
    yield CallRow(
        _layers,
        "forward",
        "all_gather",
        "ranks * experts",
        "rows for every expert",
        axis="etp_ep",
        dtype="int64",
        when="not pad",
    )
    hidden, every = " * hidden", "ranks * most"
    for axis, phase, op, rows, why, dtype in (
        ("ep", "forward", "all_to_all", f"sent{hidden}", "rows to their experts", ""),
        ("ep", "forward", "all_to_all", "sent", "weights of rows", router),
        ("etp", "forward", "all_gather", f"{every}{hidden}", "rows of all parts of an expert", ""),
        ("etp", "forward", "all_gather", every, "weights of these rows", router),
        ("etp", "forward", "reduce_scatter", f"{every}{hidden}", "partial outputs", ""),
        ("ep", "forward", "all_to_all", f"received{hidden}", "outputs to their tokens", ""),
        ("ep", "backward", "all_to_all", f"sent{hidden}", "gradients of outputs", ""),
        ("etp", "backward", "all_gather", f"{every}{hidden}", "gradients of partial outputs", ""),
        ("etp", "backward", "reduce_scatter", every, "gradients of weights, partial", router),
        ("etp", "backward", "reduce_scatter", f"{every}{hidden}", "gradients of rows, partial", ""),
        ("ep", "backward", "all_to_all", "received", "gradients of weights", router),
        ("ep", "backward", "all_to_all", f"received{hidden}", "gradients of rows", ""),
    ):
        number = next(name for name in _Numbers._fields if name in rows)
        yield CallRow(partial(_by_number, number), phase, op, rows, why, axis=axis, dtype=dtype, times="calls")


_layers = in_modules(lambda case: [f"{block}.mlp" for block in case.layers_with_experts])


def _count_row(elements: str, why: str, when: str, axis: str = "tp_cp") -> CallRow:
    return CallRow(_layers, "forward", "all_reduce", elements, why, axis=axis, dtype="int64", when=when)


BALANCE = (
    _count_row(
        'experts + (balance_of == "counted")', "tokens of every expert, of all ranks of a micro-batch", "aux_loss"
    ),
    _count_row("experts", "the same of all data ranks", "global_loss", "tp_cp_dp"),
    _count_row("rows * experts", "the same of every row", "sequence_loss"),
)
"""The counts of balance losses."""


class _Numbers(NamedTuple):
    """Rows that a rank sends, rows that it receives, and the largest number that one of the etp ranks of its experts
    receives.
    """

    sent: int
    received: int
    most: int


def _by_number(number: str, case: Case) -> Iterator[CallPlace]:
    """The calls of every layer with this number of rows; only numbers that ranks do not share have coordinates."""
    for stage, block, counts in _of_layers(case):
        own = {rank: Counter[int]() for rank in counts}
        for rank, of_rank in counts.items():
            for numbers, calls in of_rank.items():
                own[rank][getattr(numbers, number)] += calls
        for at, alike in _differing_coordinates(case, own):
            for value, calls in alike.items():
                yield CallPlace(module=f"{block}.mlp", at={**stage.at, **at}, values={number: value, "calls": calls})


def _differing_coordinates(
    case: Case, own: Mapping[int, Counter[int]]
) -> Iterator[tuple[dict[str, int], Counter[int]]]:
    """The fewest coordinates that tell ranks with other numbers apart (none, etp and ep, or all), with the numbers."""
    for axes in ((), ("etp", "ep"), tuple(axis for axis, size in case.mesh.items() if size > 1)):
        places = {rank: tuple(coordinates(case, rank)[axis][0] for axis in axes) for rank in own}
        found = {place: own[rank] for rank, place in places.items()}
        if all(found[places[rank]] == counts for rank, counts in own.items()):
            yield from ((dict(zip(axes, place, strict=True)), counts) for place, counts in found.items())
            return


@lru_cache(maxsize=4)
def _of_layers(case: Case) -> tuple[tuple[Stage, str, dict[int, Counter[_Numbers]]], ...]:
    """For every stage and each of its layers: rank -> its numbers, and how many micro-batches of the run have them."""
    kinds, groups = micro_batches(case), case.axes["etp_ep"]
    found = []
    for stage in stages(case):
        own = [ranks for ranks in groups if stage in stages_at(case, coordinates(case, ranks[0]))]
        for block in filter(stage.holds, case.layers_with_experts):
            counts = {rank: of_rank for ranks in own for rank, of_rank in _counts(case, block, ranks, kinds).items()}
            found.append((stage, block, counts))
    return tuple(found)


def _counts(
    case: Case, block: str, ranks: tuple[int, ...], kinds: Counter[tuple[int, int]]
) -> dict[int, Counter[_Numbers]]:
    """For every rank of a group that exchanges tokens: its numbers, and how many micro-batches of the run have them."""
    at = {rank: (coordinates(case, rank)["etp"][0], coordinates(case, rank)["ep"][0]) for rank in ranks}
    by_place = {place: rank for rank, place in at.items()}
    found: dict[int, Counter[_Numbers]] = {rank: Counter() for rank in ranks}
    for (step, micro), calls in kinds.items():
        rows = tuple(
            tuple(rows_sent(case, block, step, micro, by_place[etp, ep]) for ep in range(case.ep))
            for etp in range(case.expert_parts)
        )
        numbers = _numbers(rows)
        for rank in ranks:
            found[rank][numbers[at[rank]]] += calls
    return found


@lru_cache(maxsize=16)
def _numbers(rows: tuple[tuple[tuple[int, ...], ...], ...]) -> dict[tuple[int, int], _Numbers]:
    """Place (etp, ep) in the group -> the numbers of the rank there."""
    every = (RowCounts(rows=rows, etp=etp, ep=ep) for etp in range(len(rows)) for ep in range(len(rows[0])))
    return {(one.etp, one.ep): _Numbers(sum(one.rows_to_send), sum(one.rows_to_receive), one.most) for one in every}
