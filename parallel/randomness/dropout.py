"""Dropout on one rank: which mask a site draws, where it lies, and what was drawn.

    site                          dropped tensor, full shape of a sample       stream (random=stateful)
    embedding                     hidden states [seq, hidden]                  model-parallel where hidden states are
    layers.{i}.attention          what is added to them [seq, hidden]          split over tp, else the default one
    layers.{i}.mlp                what is added to them [seq, hidden]
    layers.{i}.attention.shares   softmax of attention [heads, seq, seq]       model-parallel

A packed row is one sample of batch*seq tokens. `random=field` evaluates the field (`randomness.numbers`) at the
coordinates of what the rank holds, `random=stateful` draws from its streams in the order of its forwards. Sample number
of a step: (micro * dp + data rank) * rows + row, the same for every dp and micro of one product. Source: Megatron-Core
0.16.1, `language_model_embedding.py`, `fused_bias_dropout.py`, `dot_product_attention.py`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardproof.parallel.communication.layout import Box, Coordinates, Placement, pieces, rows
from shardproof.parallel.randomness.numbers import DEFAULT, MODEL_PARALLEL, Streams, indices, kept, seeds_at
from shardproof.reference.case import Case
from shardproof.reference.checkpoints.stored import steps_before
from shardproof.reference.language.core import MODES

SHARES = "shares"
"""The last part of a site that drops shares of attention."""
Draw = tuple[int, int]
"""Step and micro-batch of a forward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropout:
    """The dropout of one rank. `places` says how a module's output, or "shares", lies for the rows of a data rank;
    `sequence_dim` where the sequence lies in hidden states. `drawn` fills up: every mask as boxes, by its name.
    """

    case: Case
    at: Coordinates
    places: Callable[[str], Placement]
    sequence_dim: int
    device: torch.device
    streams: Streams
    drawn: dict[str, dict[int, tuple[Box, ...]]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, case: Case, at: Coordinates, places: Callable[[str], Placement], *, sequence_dim: int, device: torch.device
    ) -> "Dropout":
        """The dropout of the rank at these coordinates, its streams at their beginnings."""
        return cls(
            case=case,
            at=at,
            places=places,
            sequence_dim=sequence_dim,
            device=device,
            streams=Streams(seeds_at(case.seed, at, slices=True)),
        )

    def hidden(self, x: Tensor, site: str, draw: Draw) -> Tensor:
        """Hidden states [S,B,D] or [B,S,D] with dropout of this site; themselves without any."""
        if not self.case.dropout:
            return x
        keep = self._mask(site, self.places(site), self.case.dropout, draw)
        if self.sequence_dim == 0:
            keep = keep.transpose(0, 1)
        kept_share: float = 1 - self.case.dropout
        if MODES[self.case.mode].gathers_weights:
            dropped: Tensor = _Dropped.apply(x, keep, kept_share)
            return dropped
        return x * keep / kept_share

    def shares(self, site: str, draw: Draw, dtype: torch.dtype) -> Tensor | None:
        """The factors [B,N,q,S] of this rank's shares of attention, 0 or 1/(1-p); None without dropout of them.

        Heads and queries as its core has them, the keys of whole rows.
        """
        rate: float = self.case.attention_dropout
        if not rate:
            return None
        return self._mask(f"{site}.{SHARES}", self.places(SHARES), rate, draw).to(dtype) / (1 - rate)

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Contexts of forward and of its recomputation: the second draws what the first drew."""
        if self.case.random == "field":
            return nullcontext(), nullcontext()
        return nullcontext(), self.streams.rewound(self.streams.state_dict())

    def masks(self) -> dict[str, tuple[Box, ...]]:
        """`mask/<step>/<site>`, bool [samples of a step, *shape of a sample]: what this rank drew; True is kept."""
        return {name: tuple(box for boxes in by.values() for box in boxes) for name, by in self.drawn.items()}

    def _mask(self, site: str, place: Placement, rate: float, draw: Draw) -> Tensor:
        """This rank's mask of a site: bool [rows, ...] in the layout of its placement."""
        step, micro = draw
        count = place.shape[0]
        first = (micro * self.case.dp + self.at["dp"][0]) * count
        held = indices(place, self.at)
        if self.device.type == "meta":
            return torch.empty([len(index) for index in held], dtype=torch.bool, device=self.device)
        if self.case.random == "field":
            mask = kept(
                self.case.seed,
                site,
                rate,
                step=steps_before(self.case) + step,
                samples=first + held[0],
                elements=held[1:],
                shape=place.shape[1:],
            )
        else:
            mask = self._next([len(index) for index in held], place, rate, split=site.endswith(SHARES))
        boxes = rows(pieces(mask, place, self.at), first=first, total=self.case.dp * self.case.micro * count)
        self.drawn.setdefault(f"mask/{step}/{site}", {}).setdefault(micro, boxes)  # forward's, not its repetition's
        return mask.to(self.device)

    def _next(self, shape: list[int], place: Placement, rate: float, *, split: bool) -> Tensor:
        """The next mask of the stream that is right for this placement."""
        with self.streams.fork(MODEL_PARALLEL if split or "tp" in place.axes else DEFAULT) as generator:
            return torch.rand(shape, generator=generator, dtype=torch.float32) >= rate


class _Dropped(torch.autograd.Function):
    """x * mask / (1 - p), whose graph holds the mask itself.

    So a layer is computed again when its last linear needs weights, as without dropout: in InternEvo modules start it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, keep: Tensor, kept: float) -> Tensor:
        ctx.keep, ctx.kept = keep, kept
        return x * keep / kept

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient / ctx.kept * ctx.keep, None, None
