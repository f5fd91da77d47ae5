"""Compares the outputs of modules of both launches, to find the first wrong module by the search for all subjects.

Rows of the second launch's outputs are put into the order of the first launch's samples. Then data ranks and
micro-batches are joined, and the search (harness.diagnosing.placing) has the layouts of the other axes to try. Outputs
fail no check: they show where an error begins that a check has found.

Gradients of outputs also show by which number of targets a loss was divided. A gradient is zero where the target is
ignored. Elsewhere it is divided by the number of targets that count in the whole step, if the loss is right, or in a
data rank or micro-batch, if each of these has a mean of its own. Then loss and gradients are means of means, and no
common factor corrects them.
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
"""Factors within this share of each other are equal, so counts of less than a thousand differ."""
_LEFT = 1e-2
"""A gradient is a multiple of another one when it leaves less than this share of itself."""
Calls = dict[str, list[Tensor]]
"""Path of a module -> what it returned, call by call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Both launches, and which of their parameters, samples and ranks belong together."""

    first: Launch
    second: Launch
    partners: Partners
    samples: Samples
    axes: Axes
    dtype: str
    controls: Sequence[Launch] = ()


def find_wrong_module(both: Compared, *, forward: bool, backward: bool) -> Located | None:
    """The first module of step 0 whose output, or its gradient, differs from the first launch; None if none does."""
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
    """What modules returned on a rank and its data ranks, in the order and under the paths of the first launch."""
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
    """What a rank's modules returned, call by call; the full tensor if the program states its layout."""
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
    """The ranks of this one's stage that hold parts of the same tensors and read the same batch."""
    return {*peers_of(rank, axes, [name for name in axes if name not in ("dp", "cp", PIPELINE)])}


def _in_order_of_first(both: Compared, calls: Mapping[int, Sequence[Tensor]]) -> list[Tensor]:
    """The calls of a module on data ranks, joined to those of the first launch; [] if outputs have no known rows."""
    sources = {peer: sources_of(both, peer) for peer in calls}
    if any(not own or len(calls[peer]) % len(own) for peer, own in sources.items()) or not any(calls.values()):
        return []
    uses = {len(calls[peer]) // len(own) for peer, own in sources.items()}
    if len(uses) != 1 or (use := uses.pop()) < 1:
        return []
    rows_by_use = [_rows_by_source(calls, sources, use, number) for number in range(use)]
    found: list[Tensor] = []
    for micro, rows in enumerate(both.samples.rows):
        for rows_of_use in rows_by_use:
            own = [rows_of_use.get((micro, row)) for row in range(rows)]
            known = [row for row in own if row is not None]
            if not known or len(known) < rows or len({row.shape for row in known}) != 1:
                return []
            joined = torch.stack(known)
            found.append(joined if _has_row_dim(calls, sources) else joined.flatten(0, 1))
    return found


def _rows_by_source(
    calls: Mapping[int, Sequence[Tensor]], sources: Mapping[int, Sequence[Sequence[Source | None]]], uses: int, use: int
) -> dict[Source, Tensor]:
    """Row of the first launch -> its part of the outputs of one of the `uses` of a module in each micro-batch."""
    found: dict[Source, Tensor] = {}
    for peer, own in sources.items():
        for micro, rows in enumerate(own):
            parts = rows_of_output(calls[peer][micro * uses + use], len(rows))
            if parts is None:
                return {}
            found |= {row: part for row, part in zip(rows, parts, strict=True) if row is not None}
    return found


def _has_row_dim(calls: Mapping[int, Sequence[Tensor]], sources: Mapping[int, Sequence[Sequence[object]]]) -> bool:
    """Whether the outputs have a dim of rows, not of the tokens of all rows."""
    peer = next(iter(calls))
    return calls[peer][0].shape[0] == len(sources[peer][0])


def rows_of_output(output: Tensor, rows: int) -> Sequence[Tensor] | None:
    """The rows of an output: its first dim is that of rows, or of the tokens of all rows; None if it is neither."""
    if not output.dim() or not rows or output.shape[0] % rows:
        return None
    if output.shape[0] == rows:
        return list(output.unbind(0))
    return list(output.unflatten(0, (rows, -1)).unbind(0))


def sources_of(both: Compared, rank: int) -> list[tuple[Source | None, ...]]:
    """The rows of the first launch in each micro-batch of a rank. A later stage has those of the first stage."""
    for group in both.axes.get(PIPELINE, ()):
        if rank in group:
            rank = group[0]
    return [rows for (own, _), rows in sorted(both.samples.sources.items()) if own == rank]


def find_own_counts(both: Compared) -> Fact | None:
    """States that each loss is divided by its own number of targets, not by that of the step; None if it is not."""
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
    """By data rank, how many targets count in each micro-batch; empty unless that is known for all losses."""
    found: dict[int, list[int]] = {}
    for (rank, _), (_, count) in sorted(_factors(both).items()):
        found.setdefault(rank, []).append(count)
    return found if sum(map(len, found.values())) == losses else {}


def _factors(both: Compared) -> Mapping[tuple[int, int], tuple[float, int]]:
    """(data rank, micro-batch) -> the factor of its gradient over the first launch's, and how many targets count in it.

    The gradient is that of the output nearest to the loss that every micro-batch recorded. Empty if it is no multiple
    in one of these.
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
    """The gradient of a row of the first launch. `parts` are its rows by micro-batch."""
    rows = parts[place[0]] if place is not None else None
    return rows[place[1]] if rows is not None and place is not None else None


def _factor(rows: Sequence[Tensor] | None, true: Sequence[Tensor | None]) -> tuple[float, int] | None:
    """The factor of these rows over `true`, and how many of their targets count; None if they are no multiple."""
    known = [row for row in true if row is not None]
    if not rows or len(known) != len(rows) or any(a.shape != b.shape for a, b in zip(rows, known, strict=True)):
        return None
    mine, theirs = torch.stack(list(known)).double(), torch.stack(list(rows)).double()
    square, counted = float(mine.square().sum()), int(mine.flatten(0, -2).any(-1).sum())
    factor = float((theirs * mine).sum()) / square if square else 0.0
    is_multiple = factor and float((theirs - factor * mine).norm()) <= _LEFT * float(theirs.norm())
    return (factor, counted) if is_multiple else None


def _are_alike(values: Tensor) -> bool:
    return bool((values - values.mean()).abs().max() <= _CLOSE * values.abs().max())
