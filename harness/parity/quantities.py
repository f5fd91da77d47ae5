"""The quantities of training by the names that checks know, of both launches.

    init/p, grad/p, param_after/s/p, exp_avg_after/s/p, ..   parameters by the first launch's names
    loss/s        what backward began from, of all micro-batches and data ranks together (`Reading`)
    grad_norm/s   the norm that clipping returned

Those of the first launch are full tensors, those of the second one blocks by rank, cut as `partners` says.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from shardproof.harness.checking.measures.kinds import kind_of
from shardproof.harness.checking.measuring import INITIAL
from shardproof.harness.diagnosing.causes.proofs import last_bits
from shardproof.harness.outcome.blocks import Block
from shardproof.harness.outcome.merging import Flaw, merge_outcomes, same_bits
from shardproof.harness.parity.partners import Partners, is_flat
from shardproof.harness.parity.recorded import Launch, state_name, stated_block
from shardproof.harness.programs.values import RankValues, ValueRow
from shardproof.harness.protocols import Axes

_AFTER = ("param_after", "state_after")
_PASSING = frozenset({"loss", "grad", "grad_norm"})
"""Kinds of values that no later step depends on, so that their replicas may differ by rounding."""
DATA_AXES = ("dp", "cp")
"""Axes whose ranks have losses of other samples, or of other parts of samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How losses make up the loss of a step: they are added or averaged over the calls of backward of a rank, and over
    the ranks with samples of their own. Gradients are those that backward left, or those that the optimizer received.

    `counts`: (step, rank) -> the targets of each of its calls. With them, the losses of the second launch are means
    over targets, and are averaged by these numbers.
    """

    calls: str = "sum"
    ranks: str = "mean"
    received: bool = False
    counts: Mapping[tuple[int, int], Sequence[int]] = field(default_factory=dict)


READINGS = (Reading(), Reading(calls="mean"), Reading(ranks="sum"), Reading(calls="mean", ranks="sum"))
"""Readings, first the one whose objective has averaged gradients."""


def full_tensors(launch: Launch, reading: Reading = READINGS[0]) -> tuple[dict[str, Tensor], tuple[Flaw, ...]]:
    """The full tensors of a launch by name, merged from its ranks as the program states; and the names that do not
    merge.
    """
    outcomes: dict[int, dict[str, list[Block]]] = {rank: {} for rank in range(launch.world_size)}
    for rank, row, kind in _rows_of_parameters(launch, reading):
        full = _name_of(kind, row, launch.aliases.get(row.name, row.name))
        if full and not row.alias_of:
            outcomes[rank.rank].setdefault(full, []).append(stated_block(row, rank.tensor(row)))
    everyone = {"dp": (tuple(rank.rank for rank in launch.ranks),)} if launch.world_size > 1 else {}
    _add_numbers(outcomes, launch, everyone, replace(reading, counts={}))
    alone = {name: own[0].local for name, own in outcomes[0].items() if launch.world_size == len(own) == 1}
    whole = {name: tensor for name, tensor in alone.items() if outcomes[0][name][0].global_shape == tuple(tensor.shape)}
    merged = merge_outcomes(list(outcomes.values()), whole)
    order = sorted(merged.tensors, key=_order_of_kind)
    return {name: merged.tensors[name] for name in order}, merged.flaws


def control_tensors(launch: Launch, flat: Mapping[str, bool], reading: Reading) -> dict[str, Tensor]:
    """The tensors of a further run of the first launch, with the initial values of its parameters."""
    tensors, _ = full_tensors(launch, reading)
    started = {
        name.replace("init/", INITIAL, 1): tensor for name, tensor in tensors.items() if name.startswith("init/")
    }
    return with_flat({**tensors, **started}, flat)


def outcomes_of(
    second: Launch, partners: Partners, axes: Axes, reading: Reading = READINGS[0]
) -> list[dict[str, tuple[Block, ...]]]:
    """By rank, the blocks of the second launch under the first one's names."""
    outcomes: dict[int, dict[str, list[Block]]] = {rank: {} for rank in range(second.world_size)}
    firsts: dict[tuple[str, object], Block] = {}
    shapes = {(rank.rank, row.name): row.shape for rank, row in second.rows("param")}
    for rank, row, kind in _rows_of_parameters(second, reading):
        placement = partners.placements.get((rank.rank, row.name)) if _name_of(kind, row, row.name) else None
        lies_alike = row.global_shape is not None or row.shape == shapes.get((rank.rank, row.name))
        if placement is None or not lies_alike:  # a state that factors a matrix has another shape
            continue
        local = rank.tensor(row)
        for parameter, block in placement.blocks_of(row, local):
            outcomes[rank.rank].setdefault(_name_of(kind, row, parameter), []).append(block)
            _hold_once(outcomes[rank.rank], _name_of(kind, row, parameter), firsts)
    _add_numbers(outcomes, second, axes, reading)
    for own in outcomes.values():
        for name in (name for name in own if kind_of(name) in ("loss", "grad_norm")):
            _hold_once(own, name, firsts)
    return [{name: tuple(blocks) for name, blocks in own.items()} for own in outcomes.values()]


def _hold_once(own: dict[str, list[Block]], name: str, firsts: dict[tuple[str, object], Block]) -> None:
    """Replace the last block of a name by its first replica, if they are equal.

    So equal replicas are stored once. Values that no later step depends on may differ in their last bits.
    """
    block = own[name][-1]
    first = firsts.setdefault((name, (block.region, block.terms)), block)
    if first is not block and (same_bits(first.local, block.local) or _are_close(name, first.local, block.local)):
        own[name][-1] = first


def _are_close(name: str, first: Tensor, other: Tensor) -> bool:
    """Whether replicas of a number of one step differ in their last bits alone."""
    if kind_of(name) not in _PASSING or not first.is_floating_point() or not first.numel():
        return False
    gap, largest = (float(one.double().abs().max()) for one in (other.double() - first.double(), first))
    return gap <= last_bits(first) * largest


def flat_parameters(second: Launch, partners: Partners, initial: Mapping[str, Tensor]) -> dict[str, bool]:
    """The parameters that ranks of the second launch hold as pieces of flat ones."""
    found = {}
    for rank, row in second.rows("param"):
        placement = partners.placements.get((rank.rank, row.name))
        if placement is not None and placement.stated and is_flat(row, initial[placement.stated]):
            found[placement.stated] = True
    return found


def with_flat(tensors: Mapping[str, Tensor], flat: Mapping[str, bool]) -> dict[str, Tensor]:
    """The tensors of a launch, those of `flat` parameters flattened."""

    def parameter_of(name: str) -> str:
        kind, _, rest = name.partition("/")
        return rest.partition("/")[2].partition(":")[0] if kind.endswith("_after") else rest

    return {name: tensor.flatten() if parameter_of(name) in flat else tensor for name, tensor in tensors.items()}


def is_clipped(launch: Launch) -> bool:
    """Whether the program clips by torch's own function, so that gradients before and after clipping are known."""
    return any(launch.rows("grad_clipped"))


def _rows_of_parameters(launch: Launch, reading: Reading) -> Iterator[tuple[RankValues, ValueRow, str]]:
    """Every row of a parameter, with the kind of its name in an outcome."""
    for rank, row in launch.rows("param"):
        yield rank, row, "init"
    for rank, row in launch.rows("grad_clipped" if reading.received and is_clipped(launch) else "grad"):
        yield rank, row, "grad"
    for step in range(launch.steps):
        for kind in _AFTER:
            for rank, row in launch.rows(kind, step):
                yield rank, row, kind


def _name_of(kind: str, row: ValueRow, parameter: str) -> str:
    return state_name(row, parameter) if kind in _AFTER else f"{kind}/{parameter}"


def _order_of_kind(name: str) -> int:
    kinds = ("init", "loss", "grad", "grad_norm")
    kind = name.partition("/")[0]
    return kinds.index(kind) if kind in kinds else len(kinds)


def _add_numbers(outcomes: Mapping[int, dict[str, list[Block]]], launch: Launch, axes: Axes, reading: Reading) -> None:
    """Add losses and norms: numbers that some ranks have, and that are those of all."""
    for step in range(launch.steps):
        for kind, numbers in (("loss", losses_of(launch, axes, step, reading)), ("grad_norm", norms_of(launch, step))):
            for rank, number in numbers.items():
                block = Block(local=number, offsets=(), global_shape=())
                outcomes[rank].setdefault(f"{kind}/{step}", []).append(block)


def losses_of(launch: Launch, axes: Axes, step: int, reading: Reading) -> dict[int, Tensor]:
    """The loss of a step on all data ranks, by rank that has one."""
    own: dict[int, list[Tensor]] = {}
    for rank, row in launch.rows("loss", step):
        value = rank.tensor(row).double() if row.dtype.endswith(("float64", "float32")) else rank.tensor(row).float()
        own.setdefault(rank.rank, []).append(value.sum() if value.dim() else value)
    calls = {rank: _together(values, reading.calls) for rank, values in own.items()}
    found = {}
    for number in calls:
        others = [other for other in peers_of(number, axes) if other in calls]
        if reading.counts:
            pairs = [pair for one in others for pair in zip(own[one], reading.counts[step, one], strict=True)]
            found[number] = torch.stack([loss * count for loss, count in pairs]).sum() / sum(n for _, n in pairs)
        else:
            found[number] = _together([calls[other] for other in others], reading.ranks)
    return found


def peers_of(rank: int, axes: Axes, names: Sequence[str] = DATA_AXES) -> list[int]:
    """The ranks with the same coordinates as this one on all axes but these, in order."""
    found, queue = {rank}, [rank]
    while queue:
        one = queue.pop()
        for name in names:
            for group in axes.get(name, ()):
                if one in group:
                    queue += [other for other in group if other not in found]
                    found |= {*group}
    return sorted(found)


def _together(values: Sequence[Tensor], how: str) -> Tensor:
    total = torch.stack(list(values)).sum()
    return total / len(values) if how == "mean" else total


def norms_of(launch: Launch, step: int) -> dict[int, Tensor]:
    """The last norm of a step by rank; if it is still to be reduced over ranks, the reduced one."""
    found: dict[int, Tensor] = {}
    parts: dict[int, tuple[ValueRow, Tensor]] = {}
    for rank, row in launch.rows("norm", step):
        value = rank.tensor(row).double()
        value = value.sum() if value.dim() else value
        parts[rank.rank] = row, value
    for number, (row, value) in parts.items():
        if not row.pending:
            found[number] = value
            continue
        mine = {name: at for name, _, at in row.axes if name not in row.pending_axes}
        terms: dict[tuple[int, ...], Tensor] = {}
        for other, part in parts.values():
            places = {name: at for name, _, at in other.axes}
            if all(places.get(name) == at for name, at in mine.items()):
                terms.setdefault(tuple(places[name] for name in other.pending_axes), part)
        stacked = torch.stack(list(terms.values()))
        power = float(row.pending.removeprefix("norm ")) if row.pending.startswith("norm") else 0.0
        found[number] = torch.linalg.vector_norm(stacked, power) if power else stacked.sum()
    return found
