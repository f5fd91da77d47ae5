"""The outputs of modules of both launches, so that the first wrong module is found as everywhere.

Rows of the second launch's outputs are put where the samples of the first one stand: then its data ranks and
micro-batches are one, and what is left are the layouts of the other axes, which the search tries
(harness.diagnosing.placing). Outputs decide nothing: they say where it begins that something else is wrong.

Gradients of outputs show the count of targets that a loss is divided by, too. They are zero where a target is ignored,
and are divided by the count of the others: of the whole step where that is right, of a data rank or a micro-batch alone
where each has a mean of its own. Loss and gradients are then means of means, right by no common factor.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shardproof.harness.checking.records import Located
from shardproof.harness.diagnosing.placing.modules_by_name import Watched, locate_wrong_module
from shardproof.harness.mesh_axes import PIPELINE
from shardproof.harness.outcome.blocks import Block, blocks
from shardproof.harness.outcome.merging import merge_outcomes
from shardproof.harness.parity.partners import Partners
from shardproof.harness.parity.quantities import peers_of
from shardproof.harness.parity.recorded import Launch, stated_block
from shardproof.harness.parity.samples import Samples, Source
from shardproof.harness.protocols import Axes
from shardproof.harness.recording.capturing.module_calls import ModuleCalls, TensorCopy
from shardproof.harness.verdicts.facts import Fact, state_fact

_KINDS = {"output": "outputs", "output_grad": "gradients"}
_GRADIENT = "output_grad"
_CLOSE = 1e-3
"""Factors are alike within this share: counts that are less than a thousand are told apart."""
_LEFT = 1e-2
"""A gradient is a multiple of another one when it leaves less than this share of itself."""
Calls = dict[str, list[Tensor]]
"""Path of a module -> what it returned, call by call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Both launches, with what is known of how they belong together."""

    first: Launch
    second: Launch
    partners: Partners
    samples: Samples
    axes: Axes
    dtype: str
    controls: Sequence[Launch] = ()


def find_wrong_module(both: Compared, *, forward: bool, backward: bool) -> Located | None:
    """The first module of step 0 whose output, or gradient of it, is not the first launch's; None where none is."""
    if both.first.world_size > 1 or both.samples.problem:
        return None
    truth = _calls_of_first(both.first)
    if not truth.outputs:
        return None
    axes = {name: groups for name, groups in both.axes.items() if name != "dp"}
    firsts = {min(peers_of(rank, both.axes, ("dp",))) for rank in range(both.second.world_size)}
    ranks = [
        _calls_of_rank(both, rank) if rank in firsts else ModuleCalls(outputs={}, inputs={}, gradients={})
        for rank in range(both.second.world_size)
    ]
    watched = Watched(
        ranks=ranks,
        truth=truth,
        axes={name: tuple(group for group in groups if {*group} <= firsts) for name, groups in axes.items()},
        dtype=both.dtype,
        controls=[_calls_of_first(launch) for launch in both.controls],
    )
    located = locate_wrong_module(watched, forward=forward, backward=backward)
    return replace(located, words=located.words.replace("the dense model's", "launch A's")) if located else None


def _calls_of_first(launch: Launch) -> ModuleCalls:
    found: dict[str, Calls] = {kind: {} for kind in _KINDS}
    for kind, own in found.items():
        seen: dict[tuple[str, int], int] = {}
        for rank, row in launch.rows(kind):
            if row.name and (row.name, row.call) not in seen:  # of several tensors the first
                seen[row.name, row.call] = 1
                own.setdefault(row.name, []).append(rank.tensor(row))
    return _as_calls(found)


def _as_calls(found: Mapping[str, Calls]) -> ModuleCalls:
    tensors = {
        kind: {path: tuple(TensorCopy(blocks=blocks(one)) for one in calls) for path, calls in own.items()}
        for kind, own in found.items()
    }
    return ModuleCalls(outputs=tensors["output"], inputs={}, gradients=tensors["output_grad"])


def _calls_of_rank(both: Compared, rank: int) -> ModuleCalls:
    """What the modules of a rank and of the data ranks beside it returned, by the first launch's rows and paths."""
    peers = peers_of(rank, both.axes, ("dp",))
    found: dict[str, Calls] = {}
    for kind in _KINDS:
        tensors = {peer: tensors_of_rank(both, kind, peer) for peer in peers}
        paths = dict.fromkeys(path for own in tensors.values() for path in own)
        joined = {path: _in_order_of_first(both, {peer: own.get(path, []) for peer, own in tensors.items()})
                  for path in paths}  # fmt: skip
        found[kind] = {path: calls for path, calls in joined.items() if calls}
    return _as_calls(found)


def tensors_of_rank(both: Compared, kind: str, rank: int) -> Calls:
    """What a rank's modules returned, call by call; of a layout that the program states the full tensor."""
    parts: dict[tuple[str, int], list[Block]] = {}
    leaves: dict[tuple[str, int], str] = {}
    group = _find_sharing_ranks(rank, both.axes)
    for other, row in both.second.rows(kind):
        key = row.name, row.call
        if other.rank in group and row.name and (other.rank == rank or row.global_shape is not None):
            if leaves.setdefault(key, row.leaf) != row.leaf:  # of several tensors the first
                continue
            parts.setdefault(key, []).append(stated_block(row, other.tensor(row)))
    calls: Calls = {}
    for (name, _), found in parts.items():
        stated = [block for block in found if block.reduce_op or block.local.shape != block.global_shape]
        if not stated:
            tensor: Tensor | None = found[0].local
        else:
            tensor = merge_outcomes([{"it": (block,)} for block in found]).tensors.get("it")
        if tensor is not None:
            calls.setdefault(both.partners.path(rank, name), []).append(tensor)
    return calls


def _find_sharing_ranks(rank: int, axes: Axes) -> set[int]:
    """The ranks that hold one model and read one batch together with this one, on its stage."""
    return {*peers_of(rank, axes, [name for name in axes if name not in ("dp", "cp", PIPELINE)])}


def _in_order_of_first(both: Compared, calls: Mapping[int, Sequence[Tensor]]) -> list[Tensor]:
    """The calls of a module on data ranks as those of the first launch; [] where rows cannot be told."""
    samples = both.samples
    sources = {peer: sources_of(both, peer) for peer in calls}
    if any(not own or len(calls[peer]) % len(own) for peer, own in sources.items()) or not any(calls.values()):
        return []
    uses = {len(calls[peer]) // len(own) for peer, own in sources.items()}
    if len(uses) != 1 or (use := uses.pop()) < 1:
        return []
    found: list[Tensor] = []
    for number, rows in enumerate(samples.rows):
        for of_use in range(use):
            filled: dict[int, Tensor] = {}
            for peer, own in sources.items():
                for call, places in enumerate(own):
                    parts = rows_of_output(calls[peer][call * use + of_use], len(places))
                    if parts is None:
                        return []
                    for place, part in zip(places, parts, strict=True):
                        if place is not None and place[0] == number:
                            filled[place[1]] = part
            if len(filled) != rows or len({part.shape for part in filled.values()}) != 1:
                return []
            joined = torch.stack([filled[row] for row in range(rows)])
            found.append(joined if _has_row_dim(calls, sources) else joined.flatten(0, 1))
    return found


def _has_row_dim(calls: Mapping[int, Sequence[Tensor]], sources: Mapping[int, Sequence[Sequence[object]]]) -> bool:
    peer = next(iter(calls))
    return calls[peer][0].shape[0] == len(sources[peer][0])


def rows_of_output(output: Tensor, rows: int) -> Sequence[Tensor] | None:
    """An output by samples: its first dim has a place for each, or so many for each (flattened tokens)."""
    if not output.dim() or not rows or output.shape[0] % rows:
        return None
    if output.shape[0] == rows:
        return list(output.unbind(0))
    return list(output.unflatten(0, (rows, -1)).unbind(0))


def sources_of(both: Compared, rank: int) -> list[tuple[Source | None, ...]]:
    """The first launch's rows of a rank's micro-batches; of a later stage those of the first one."""
    for group in both.axes.get(PIPELINE, ()):
        if rank in group:
            rank = group[0]
    return [rows for (own, _), rows in sorted(both.samples.sources.items()) if own == rank]


def find_own_counts(both: Compared) -> Fact | None:
    """What each loss is divided by where it is its own count of targets, not that of the step; None for any other."""
    found = _factors(both)
    factors = torch.tensor([factor for factor, _ in found.values()], dtype=torch.float64)
    counts = torch.tensor([count for _, count in found.values()], dtype=torch.float64)
    if len(found) < 2 or _are_alike(factors):
        return None
    by_rank: dict[int, list[tuple[float, float]]] = {}
    for (rank, _), own in found.items():
        by_rank.setdefault(rank, []).append(own)
    if max(map(len, by_rank.values())) > 1 and _are_alike(factors * counts):
        return state_fact("micro_batch_tokens")
    sums = [(own[0][0] * sum(count for _, count in own), [factor for factor, _ in own]) for own in by_rank.values()]
    inside = all(_are_alike(torch.tensor(factors)) for _, factors in sums)
    return state_fact("own_tokens") if inside and _are_alike(torch.tensor([total for total, _ in sums])) else None


def count_targets(both: Compared, losses: int) -> dict[int, list[int]]:
    """By data rank, how many targets count in each of its micro-batches; empty where that is unknown of some losses."""
    found: dict[int, list[int]] = {}
    for (rank, _), (_, count) in sorted(_factors(both).items()):
        found.setdefault(rank, []).append(count)
    return found if sum(map(len, found.values())) == losses else {}


def _factors(both: Compared) -> Mapping[tuple[int, int], tuple[float, int]]:
    """(data rank, micro-batch) -> its gradient in units of the first launch's, and the targets that count in it.

    The gradient is of the first output, from the loss on, that all of them have; empty where it is no multiple.
    """
    paths = dict.fromkeys(row.name for _, row in both.first.rows(_GRADIENT, 0) if row.name)
    ranks = {rank: tensors_of_rank(both, _GRADIENT, rank) for rank in range(both.second.world_size)}
    with_samples = {rank: own for rank, own in ranks.items() if sources_of(both, rank)}
    for path in paths:
        mine = [rank.tensor(row) for rank, row in both.first.rows(_GRADIENT, 0) if row.name == path]
        holding = {rank: own[path] for rank, own in with_samples.items() if path in own}
        whole = len(mine) == len(both.samples.rows)
        if not holding or not whole or any(len(own) != len(sources_of(both, rank)) for rank, own in holding.items()):
            continue
        parts = [rows_of_output(own, rows) for own, rows in zip(mine, both.samples.rows, strict=True)]
        found = {}
        for rank, own in holding.items():
            for call, (output, places) in enumerate(zip(own, sources_of(both, rank), strict=True)):
                rows = rows_of_output(output, len(places))
                found[rank, call] = _factor(rows, [_find_row(parts, place) for place in places])
        return {key: one for key, one in found.items() if one} if all(found.values()) else {}
    return {}


def _find_row(parts: Sequence[Sequence[Tensor] | None], place: Source | None) -> Tensor | None:
    """The gradient of a row of the first launch, by micro-batch and row."""
    rows = parts[place[0]] if place is not None else None
    return rows[place[1]] if rows is not None and place is not None else None


def _factor(rows: Sequence[Tensor] | None, true: Sequence[Tensor | None]) -> tuple[float, int] | None:
    known = [row for row in true if row is not None]
    if not rows or len(known) != len(rows) or any(a.shape != b.shape for a, b in zip(rows, known, strict=True)):
        return None
    mine, theirs = torch.stack(list(known)).double(), torch.stack(list(rows)).double()
    square, counted = float(mine.square().sum()), int(mine.flatten(0, -2).any(-1).sum())
    factor = float((theirs * mine).sum()) / square if square else 0.0
    return (
        (factor, counted) if factor and float((theirs - factor * mine).norm()) <= _LEFT * float(theirs.norm()) else None
    )


def _are_alike(values: Tensor) -> bool:
    return bool((values - values.mean()).abs().max() <= _CLOSE * values.abs().max())
