"""What goes wrong in context parallelism, planted: each is seen, in the outputs and gradients where it must show."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from harness.errors import RankRaised, ShardproofError
from parallel.communication.collectives import Pending
from parallel.communication.mesh import Axis
from parallel.communication.pairs import gather_from_sequence
from parallel.context import blocks, gathered, ring
from parallel.context.blocks import Partial
from parallel.context.slices import Slices, contiguous, zigzag
from tests.parallel.context.rows import METHODS, borders, dense, full_row, hidden, on_axis, wrong
from tests.parallel.ranks import Calls

ALL = ["context", "grad of q", "grad of k", "grad of v"]
RANKS, LENGTH, PADDING = 3, 18, 6
BORDERS = borders(7, 5, PADDING)
Plant = Callable[[pytest.MonkeyPatch], None]


def _summed(one: Partial, other: Partial) -> Partial:
    return one[0] + other[0], torch.logaddexp(one[1], other[1])


def _averaged(one: Partial, other: Partial) -> Partial:
    return (one[0] + other[0]) / 2, torch.logaddexp(one[1], other[1])


def _in_float32(one: Partial, other: Partial) -> Partial:
    output, total = blocks.merged((one[0].float(), one[1].float()), (other[0].float(), other[1].float()))
    return output.double(), total.double()


def _by_sigmoid(one: Partial, other: Partial) -> Partial:
    """torch's and TransformerEngine's form, without a rule for queries that see no key."""
    share = torch.sigmoid(other[1] - one[1])[..., None]
    total = one[1] - torch.nn.functional.logsigmoid(one[1] - other[1])
    return one[0] - share * (one[0] - other[0]), total


def _without_rule(score: Tensor, total: Tensor) -> Tensor:
    return (score - total[..., None]).exp()


def _local_places(slices: Slices, queries: Tensor, keys: Tensor) -> Tensor:
    return torch.arange(len(queries))[:, None] >= torch.arange(len(keys))[None, :]


def _diagonal_twice(axis: Axis, step: int) -> int:
    return axis.rank if step == axis.size - 1 else (axis.rank - step) % axis.size


_hop = ring._hop


def _not_home(block: Tensor, axis: Axis, slices: Slices, step: int, *, overlap: bool) -> Pending:
    """The last hop of the gradients is missing: they stay at the rank before their owner."""
    return Pending(None, lambda: block) if step == axis.size - 1 else _hop(block, axis, slices, step, overlap=overlap)


def _send_first(block: Tensor, axis: Axis, slices: Slices, step: int, *, overlap: bool) -> Pending:
    arriving = torch.empty_like(block)
    dist.send(block, axis.ranks[(axis.rank + 1) % axis.size], axis.group)
    dist.recv(arriving, axis.ranks[axis.rank - 1], axis.group)
    return Pending(None, lambda: arriving)


def _backward_of_block(local: tuple[bool, bool]) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """Backward with the block's own (output, log sum) instead of that of all keys."""

    def gradients(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, whole: Partial, keep: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        own = blocks.attend(q, k, v, visible, keep)
        output, total = (mine if here else all_ for here, mine, all_ in zip(local, own, whole, strict=True))
        return blocks.gradients(grad, q, k, v, visible, (output, total), keep)

    return gradients


def _stale_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward computes with the keys of its first step in every step (diffusers 14265)."""
    first: dict[int, tuple[Tensor, Tensor]] = {}

    def gradients(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        k, v = first.setdefault(threading.get_ident(), (k, v))
        return blocks.gradients(grad, q, k, v, *rest)

    monkeypatch.setattr(ring, "gradients", gradients)


def _other_groups(x: Tensor, k: Tensor) -> Tensor:
    """Query head n reads kv head n % K, not n // G."""
    grouped: Tensor = x.unflatten(2, (-1, k.shape[2]))
    return grouped.transpose(2, 3)


def _in_row_order(slices: Slices) -> Tensor:
    return torch.arange(sum(len(own) for own in slices.held))


def _set(where: Any, name: str, value: Any) -> Plant:
    return lambda monkeypatch: monkeypatch.setattr(where, name, value)


PLANTED: dict[str, tuple[str, Plant, list[str]]] = {
    "partial outputs are added, not rescaled": ("ring", _set(ring, "merged", _summed), ALL),
    "partial outputs are averaged": ("ring", _set(ring, "merged", _averaged), ALL),
    "merged in float32": ("ring", _set(ring, "merged", _in_float32), ALL),
    "merged by sigmoid, no rule for queries without keys": ("ring", _set(ring, "merged", _by_sigmoid), ALL),
    "no rule for queries without keys": ("ring", _set(blocks, "_weights", _without_rule), ALL),
    "the mask is taken at local places": ("ring", _set(Slices, "visible", _local_places), ALL),
    "the own block is counted twice": ("ring", _set(ring, "_owner", _diagonal_twice), ALL),
    "gradients stay one hop before home": ("ring", _set(ring, "_hop", _not_home), ALL[2:]),
    "backward with a block's own output": (
        "ring",
        _set(ring, "gradients", _backward_of_block((True, False))),
        ALL[1:3],
    ),
    "backward with a block's own log sum": (
        "ring",
        _set(ring, "gradients", _backward_of_block((False, True))),
        ALL[1:],
    ),
    "backward keeps the keys of its first step": ("ring", _stale_keys, ALL[1:]),
    "query heads read other kv heads": ("ring", _set(blocks, "_grouped", _other_groups), ALL),
    "gathered keys' gradients are not summed": (
        "gathered",
        _set(gathered, "gather_from_sequence", partial(gather_from_sequence, tensor_parallel_output_grad=False)),
        ALL[2:],
    ),
    "gathered keys are taken for the row in order": ("gathered", _set(Slices, "whole", property(_in_row_order)), ALL),
    "exchanged tokens are taken for the row in order": (
        "exchanged",
        _set(Slices, "whole", property(_in_row_order)),
        ALL,
    ),
}


def _row() -> tuple[list[Tensor], Slices, list[Tensor]]:
    """Two documents and padding in zigzag slices: full tensors, slices, and what dense attention gives."""
    full = full_row(2, LENGTH, 6, 3, seed=5)
    slices = Slices(held=zigzag(LENGTH, RANKS), hidden=hidden(LENGTH, BORDERS, PADDING))
    return full, slices, dense(full, BORDERS[:-1], PADDING)


@pytest.mark.parametrize("name", PLANTED)
def test_what_goes_wrong_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And where: a fault of backward alone leaves the context as it is."""
    method, plant, where = PLANTED[name]
    full, slices, expected = _row()
    assert wrong(on_axis(METHODS[method], full, slices), expected) == []
    plant(monkeypatch)
    assert wrong(on_axis(METHODS[method], full, slices), expected) == where


def test_other_slices_than_those_of_the_data_are_seen() -> None:
    """Zigzag data under the mask of contiguous slices; packed data under the mask of one document."""
    full, slices, expected = _row()
    for planted in (replace(slices, held=contiguous(LENGTH, RANKS)), replace(slices, hidden=None)):

        def method(q: Tensor, k: Tensor, v: Tensor, *, axis: Axis, slices: Slices, planted: Slices = planted) -> Tensor:
            return ring.ring_attention(q, k, v, axis=axis, slices=planted)

        assert "context" in wrong(on_axis(method, full, slices), expected)


def test_heads_repeated_before_the_ring_are_seen_in_the_bytes_alone() -> None:
    """picotron: numbers right, N/K times the bytes."""
    full, slices, expected = _row()

    def method(q: Tensor, k: Tensor, v: Tensor, *, axis: Axis, slices: Slices) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
        return ring.ring_attention(q, k, v, axis=axis, slices=slices)

    sent = []
    for each in (METHODS["ring"], method):
        assert wrong(on_axis(each, full, slices, observer=(calls := Calls())), expected) == []
        sent.append(sum(call.payload_bytes for call in calls.by_rank[0]))
    assert sent[1] == 2 * sent[0]


def test_sends_before_receives_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    full, slices, _ = _row()
    monkeypatch.setattr(ring, "_hop", _send_first)
    with pytest.raises(ShardproofError, match="send") as raised:
        on_axis(METHODS["ring"], full, slices)
    assert not isinstance(raised.value, RankRaised)
