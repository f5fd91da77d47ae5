"""The calls of layers with experts, one micro-batch each; payloads differ by rank, for they follow the choices.

`sent` and `received` are the rows of one rank, `most` the most that one of the etp ranks of its experts receives. What
goes forward returns in backward the other way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import lru_cache

from parallel.communication.expectation import ACTIVATION, CallPlace, CallRow, in_modules
from parallel.communication.mesh import coordinates
from parallel.experts.counts import Sent, rows_sent
from parallel.schedules.stages import stages
from reference.case import Case

__all__ = ["rows_of_experts"]

_OWN = "slice_tokens // tp"
"""Tokens of one rank."""


def rows_of_experts(case: Case) -> tuple[CallRow, ...]:
    """The calls of the case's layers with experts, shared ones aside, which are linears like others."""
    router = case.dtype if case.router_dtype == "model" else case.router_dtype
    dispatched = _gathered(router) if case.dispatcher == "allgather" else _exchanged(router)
    return (*_around(case), *dispatched, *(row for row in BALANCE if getattr(case, row.when)))


def _around(case: Case) -> Iterator[CallRow]:
    """Where hidden states are whole, around all."""
    if not case.system.sequence:
        yield CallRow(_layers, "forward", "all_gather", ACTIVATION, "outputs of the tokens of all tensor ranks")
        yield CallRow(_layers, "backward", "all_gather", ACTIVATION, "gradients of the tokens of all tensor ranks")


def _gathered(router: str) -> Iterator[CallRow]:
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


def _exchanged(router: str) -> Iterator[CallRow]:
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
        yield CallRow(_by_rank, phase, op, rows, why, axis=axis, dtype=dtype, times="calls")


_layers = in_modules(lambda case: [f"{block}.mlp" for block in case.layers_with_experts])


def _counted(elements: str, why: str, when: str, axis: str = "tp_cp") -> CallRow:
    return CallRow(_layers, "forward", "all_reduce", elements, why, axis=axis, dtype="int64", when=when)


BALANCE = (
    _counted("experts", "tokens of every expert, of all ranks of a micro-batch", "aux_loss"),
    _counted("experts", "the same of all data ranks", "global_loss", "tp_cp_dp"),
    _counted("rows * experts", "the same of every row", "sequence_loss"),
)
"""The counts of balance losses."""


def _by_rank(case: Case) -> Iterator[CallPlace]:
    """Every layer on every rank that sends other numbers of rows than others, by these numbers."""
    return iter(_places(case))


@lru_cache(maxsize=4)
def _places(case: Case) -> tuple[CallPlace, ...]:
    found: list[CallPlace] = []
    for stage in stages(case):
        ranks = [rank for rank in range(case.world_size) if coordinates(case, rank)["pp"][0] == stage.rank]
        for block in filter(stage.holds, case.layers_with_experts):
            counts = {rank: _counts(case, block, rank) for rank in ranks}
            alike = len({frozenset(of_rank.items()) for of_rank in counts.values()}) == 1
            for rank, of_rank in [*counts.items()][: 1 if alike else None]:
                at = {} if alike else {axis: coordinates(case, rank)[axis][0] for axis in case.mesh}
                for (sent, received, most), calls in of_rank.items():
                    values = {"sent": sent, "received": received, "most": most, "calls": calls}
                    found.append(CallPlace(module=f"{block}.mlp", at={**stage.at, **at}, values=values))
    return tuple(found)


def _counts(case: Case, block: str, rank: int) -> Counter[tuple[int, int, int]]:
    """(sent, received, most) of a rank -> in how many micro-batches of the run."""
    every = next(ranks for ranks in case.axes["etp_ep"] if rank in ranks)
    at = {(coordinates(case, one)["etp"][0], coordinates(case, one)["ep"][0]): one for one in every}
    own = coordinates(case, rank)
    found: Counter[tuple[int, int, int]] = Counter()
    for step in range(case.steps):
        for micro in range(case.micro):
            of_rank = rows_sent(case, block, step, micro)
            rows = tuple(tuple(of_rank[at[etp, ep]] for ep in range(case.ep)) for etp in range(case.expert_parts))
            sent = Sent(rows=rows, etp=own["etp"][0], ep=own["ep"][0])
            found[sum(sent.sent), sum(sent.received), sent.most] += 1
    return found
