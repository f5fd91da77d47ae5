"""Random numbers of a rank: a field or streams, initial values drawn from them, and dropout.

A *field* gives numbers as a function of their place. A rank evaluates it at the global coordinates of what it holds, so
every layout has the same numbers. It is Philox4x32-10 of a key and a counter, which gives four words:

    key      the first 8 bytes of sha256("<seed> dropout <site>") or ("<seed> init <name>"), two little-endian words
    counter  element % 2^32, element / 2^32, sample, step       element: row-major in the full tensor of one sample

    mask           kept where the first word / 2^32 >= p
    initial value  (sum of the words - 2 (2^32 - 1)) / sqrt((2^64 - 1) / 3): mean 0 and standard deviation 1

All arithmetic is in int64, whose product keeps the low 64 bits: equal on every device. `reference.model.randomness` is
another implementation of the same function. Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC
2011 (Random123).

A *stream* gives numbers in the order in which a rank draws them. Streams have Megatron's names and seeds:

    seed' = seed + 100 * pp_rank + CONTEXT_STRIDE * cp_rank
    data-parallel-rng      seed'                                     the default; the same on all ranks of tp
    model-parallel-rng     seed' + 2718 + tp_rank
    expert-parallel-rng    seed' + 1024 + 100 * ep_rank + etp_rank

The last term of seed' is added for dropout only. Megatron has no such term, so its masks repeat along the sequence on
every context rank (Megatron-LM #4828). Source: Megatron-Core 0.16.1 `tensor_parallel/random.py`,
`training/initialize.py`.

Initial weights have mean 0 and standard deviation 0.02, those of row linears 0.02 / sqrt(2 * layers); biases are 0,
norms 1. Data and context ranks draw alike.

    init=whole   the case's weights (`reference.model.parameters`), cut
    init=field   the field at the place in the full tensor
    init=shard   drawn by each rank from streams, in the order of the model's parameters; the dense model is given these

With init=shard Megatron (`tp`, `tp-sp`) draws split parameters from the model-parallel stream, whole ones from the
default one. InternEvo (`mtp`, `msp`, `fsp`, `isp`) draws all from one stream, of seed + rank + 1024 * stage; rank is
the tensor rank (isp: weight rank). It then broadcasts whole parameters from the first rank; here every rank draws what
the first one draws. Sources: Megatron-Core 0.16.1 `_initialize_affine_weight_gpu`, `init_method_normal`; InternEvo
`parallel_context.py` set_seed.

Dropout has a mask for each site:

    site                          dropped tensor, full shape of a sample       stream (random=stateful)
    embedding                     hidden states [seq, hidden]                  model-parallel where hidden states are
    layers.{i}.attention          what is added to them [seq, hidden]          split over tp, else the default one
    layers.{i}.mlp                what is added to them [seq, hidden]
    layers.{i}.attention.shares   softmax of attention [heads, seq, seq]       model-parallel

With random=field a rank evaluates the field at the coordinates of what it holds; with random=stateful it draws from its
streams in the order of its forwards. The number of a sample in a step is (micro * dp + data rank) * rows + row, the
same for every dp and micro of one product. A packed row is one sample of batch*seq tokens. Source: Megatron-Core
0.16.1, `language_model_embedding.py`, `fused_bias_dropout.py`, `dot_product_attention.py`.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from shardproof.parallel.communication.layout import Box, Coordinates, Placement, local_shape, pieces, rows, shard
from shardproof.parallel.communication.schedules import stages_at
from shardproof.reference.case import Case
from shardproof.reference.checkpoints.foreign import steps_before
from shardproof.reference.language.core import MODES
from shardproof.reference.model.parameters import drawn_weight

_WORD = 0xFFFFFFFF
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10


def philox(key: tuple[int, int], counter: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four words of Philox4x32-10, int64 in [0, 2^32), of four counter words of one shape (after broadcast)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (second >> 32 & _WORD) ^ c1 ^ k0,
            second & _WORD,
            (first >> 32 & _WORD) ^ c3 ^ k1,
            first & _WORD,
        )
        k0, k1 = k0 + _WEYL[0] & _WORD, k1 + _WEYL[1] & _WORD
    return c0, c1, c2, c3


def element_indices(place: Placement, at: Coordinates) -> list[Tensor]:
    """For every dim of a placed tensor, the global indices that the rank at these coordinates holds, in their order on
    the rank; padding has index 0. Every cut must be along a dim.
    """
    found = [torch.arange(size) for size in place.shape]
    for cut in place.cuts:
        assert cut.dim is not None  # a flat range has no indices by dim
        line = found[cut.dim]
        found[cut.dim] = shard(line, Placement(shape=tuple(line.shape), cuts=(replace(cut, dim=0),)), at)
    return found


def keep_mask(
    seed: int, site: str, rate: float, *, step: int, samples: Tensor, elements: Sequence[Tensor], shape: Sequence[int]
) -> Tensor:
    """The mask of a site at these coordinates, bool [samples, *elements]; dropout at this rate keeps what is True.

    `elements` are the indices along each dim of a sample, whose full tensor has this `shape`.
    """
    first, *_ = _philox_words(f"{seed} dropout {site}", elements, shape, step=step, samples=samples)
    return first >= math.ceil(rate * 2**32)


def standard_values(seed: int, name: str, elements: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """Float64 [*elements]: values of mean 0 and standard deviation 1 of a parameter of this full `shape`."""
    words = _philox_words(f"{seed} init {name}", elements, shape, step=0, samples=torch.zeros(1, dtype=torch.int64))
    return (sum(words[1:], words[0])[0] - 2 * _WORD).double() / math.sqrt((2.0**64 - 1) / 3)


def _philox_words(
    text: str, elements: Sequence[Tensor], shape: Sequence[int], *, step: int, samples: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    digest = hashlib.sha256(text.encode("ascii")).digest()
    key = int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")
    dims = len(elements)
    element = torch.zeros((1,) * (dims + 1), dtype=torch.int64)
    for dim, index in enumerate(elements):
        element = element * shape[dim] + index.view((-1,) + (1,) * (dims - 1 - dim))
    sample = samples.view((-1,) + (1,) * dims)
    counter = element & _WORD, element >> 32, sample, torch.full_like(sample, step)
    return philox(key, counter)


DEFAULT, MODEL_PARALLEL, EXPERT = "data-parallel-rng", "model-parallel-rng", "expert-parallel-rng"
CONTEXT_STRIDE = 2**16
_SEEDS = 2**64
"""A generator takes seeds below this."""


def stream_seeds(
    seed: int, *, tp_rank: int = 0, pp_rank: int = 0, cp_rank: int = 0, ep_rank: int = 0, etp_rank: int = 0
) -> dict[str, int]:
    """Name of each stream of a rank -> its seed."""
    own = seed + 100 * pp_rank + CONTEXT_STRIDE * cp_rank
    found = {DEFAULT: own, MODEL_PARALLEL: own + 2718 + tp_rank, EXPERT: own + 1024 + 100 * ep_rank + etp_rank}
    return {name: value % _SEEDS for name, value in found.items()}


def seeds_at(seed: int, at: Coordinates, *, slices: bool) -> dict[str, int]:
    """Seeds of the rank at these coordinates. With `slices` each context rank has seeds of its own."""
    return stream_seeds(seed, tp_rank=at["tp"][0], pp_rank=at["pp"][0], cp_rank=at["cp"][0] if slices else 0)


def continues_streams(at: Coordinates) -> bool:
    """Whether dropout continues the streams of initial values: it does on the first context ranks."""
    return at["cp"][0] == 0


class Streams:
    """Streams that take turns on one CPU generator. Draws from `generator` come from the current stream.

    The generator is the object's own: it and torch's default generator do not influence each other.
    """

    def __init__(self, seeds: Mapping[str, int]) -> None:
        self.generator = torch.Generator(device="cpu")
        made = {name: torch.Generator(device="cpu").manual_seed(seed) for name, seed in seeds.items()}
        self._states = {name: generator.get_state() for name, generator in made.items()}
        self._current = next(iter(seeds))
        self.generator.set_state(self._states[self._current])

    @contextmanager
    def fork(self, name: str) -> Iterator[torch.Generator]:
        """A context in which draws come from this stream; afterwards the former stream continues as if nothing was
        drawn.

        A fork of the current stream, at any depth, continues with it: a stream never draws its numbers twice. Raises
        ValueError for an unknown name.
        """
        if name not in self._states:
            raise ValueError(f"name={name}: is no stream; legal: {' '.join(self._states)}")
        outer = self._current
        self._switch(name)
        try:
            yield self.generator
        finally:
            self._switch(outer)

    def state_dict(self) -> dict[str, Tensor]:
        """Name -> a copy of the stream's state, uint8 [bytes]; the current one too."""
        self._states[self._current] = self.generator.get_state()
        return {name: state.clone() for name, state in self._states.items()}

    def load_state_dict(self, states: Mapping[str, Tensor]) -> None:
        """Continue from these states. Raises ValueError unless their names are those of the streams."""
        if set(states) != set(self._states):
            raise ValueError(f"states={sorted(states)}: must be those of the streams; legal: {sorted(self._states)}")
        self._states = {name: state.clone() for name, state in states.items()}
        self.generator.set_state(self._states[self._current])

    @contextmanager
    def rewound(self, states: Mapping[str, Tensor]) -> Iterator[None]:
        """A context in which draws begin at these states; afterwards every stream continues as if nothing was drawn."""
        now = self.state_dict()
        self.load_state_dict(states)
        try:
            yield
        finally:
            self.load_state_dict(now)

    def _switch(self, name: str) -> None:
        if name != self._current:
            self._states[self._current] = self.generator.get_state()
            self.generator.set_state(self._states[name])
            self._current = name


_STANDARD = 0.02
_ROW = ("wo", "w2")
_OWN, _FIRST = "own", "first rank's"
_STAGE = 1024


def streams_of(case: Case, at: Coordinates) -> Streams:
    """The streams from which the rank at these coordinates draws initial values."""
    if not _is_internevo(case):
        return Streams(seeds_at(case.seed, at, slices=False))
    first, rank = case.seed + _STAGE * stages_at(case, at)[0].rank, at[_axis(case)][0]
    return Streams({_FIRST: first, **({_OWN: first + rank} if rank else {})})


def initial_value(case: Case, name: str, place: Placement, at: Coordinates, streams: Streams) -> Tensor:
    """The initial value of a parameter's part on the rank at these coordinates; padding is 0."""
    if case.init == "whole":
        return shard(drawn_weight(case, name), place, at)
    real = shard(torch.ones(place.shape, dtype=torch.float64), place, at)  # 0 where there is padding
    module, _, leaf = name.replace(".experts.down.", ".experts.w2.").rpartition(".")
    if leaf == "bias":
        return torch.zeros_like(real)
    if module.endswith("norm"):
        return real
    scale = _STANDARD / math.sqrt(2 * case.layers) if module.rpartition(".")[2] in _ROW else _STANDARD
    if case.init == "field":
        return standard_values(case.seed, name, element_indices(place, at), place.shape) * scale * real
    if not _is_internevo(case):
        stream = MODEL_PARALLEL if "tp" in place.axes else DEFAULT  # each rank of a pipeline stage holds all of these
        return _draw_normal(streams, stream, local_shape(place, at), scale) * real
    rank, size = at[_axis(case)]
    first = _draw_normal(streams, _FIRST, local_shape(place, {**at, _axis(case): (0, size)}), scale)
    own = _draw_normal(streams, _OWN, local_shape(place, at), scale) if rank else first
    return (own if _axis(case) in place.axes else first) * real


def _draw_normal(streams: Streams, stream: str, shape: tuple[int, ...], scale: float) -> Tensor:
    with streams.fork(stream) as generator:
        return torch.empty(shape, dtype=torch.float64).normal_(0, scale, generator=generator)


def _is_internevo(case: Case) -> bool:
    return MODES[case.mode].system == "InternEvo"


def _axis(case: Case) -> str:
    return MODES[case.mode].weight_axis


SHARES = "shares"
"""The last part of a site that drops shares of attention."""
Draw = tuple[int, int]
"""Step and micro-batch of a forward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropout:
    """The dropout of one rank.

    `places` says how a module's output, or the tensor "shares", lies for the rows of a data rank. `sequence_dim` is the
    dim of hidden states along the sequence. `drawn` collects every mask as boxes, by its name and micro-batch.
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
        """The dropout of the rank at these coordinates, with every stream at its beginning."""
        return cls(
            case=case,
            at=at,
            places=places,
            sequence_dim=sequence_dim,
            device=device,
            streams=Streams(seeds_at(case.seed, at, slices=True)),
        )

    def hidden(self, x: Tensor, site: str, draw: Draw) -> Tensor:
        """Hidden states [S,B,D] or [B,S,D] after dropout at this site; unchanged if there is none."""
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
        """The factors [B,N,q,S] for this rank's attention shares, 0 or 1/(1-p); None if they are not dropped.

        Heads and queries are those of the rank's core, keys those of whole rows.
        """
        rate: float = self.case.attention_dropout
        if not rate:
            return None
        return self._mask(f"{site}.{SHARES}", self.places(SHARES), rate, draw).to(dtype) / (1 - rate)

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """The contexts of a forward and of its recomputation: the second draws what the first drew."""
        if self.case.random == "field":
            return nullcontext(), nullcontext()
        return nullcontext(), self.streams.rewound(self.streams.state_dict())

    def masks(self) -> dict[str, tuple[Box, ...]]:
        """`mask/<step>/<site>`, bool [samples of a step, *shape of a sample]: what this rank drew. True is kept."""
        return {name: tuple(box for boxes in by.values() for box in boxes) for name, by in self.drawn.items()}

    def _mask(self, site: str, place: Placement, rate: float, draw: Draw) -> Tensor:
        """This rank's mask of a site: bool [rows, ...] in the layout of its placement."""
        step, micro = draw
        count = place.shape[0]
        first = (micro * self.case.dp + self.at["dp"][0]) * count
        held = element_indices(place, self.at)
        if self.device.type == "meta":
            return torch.empty([len(index) for index in held], dtype=torch.bool, device=self.device)
        if self.case.random == "field":
            mask = keep_mask(
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
        # A recomputation draws the same mask again; that of forward is kept.
        self.drawn.setdefault(f"mask/{step}/{site}", {}).setdefault(micro, boxes)
        return mask.to(self.device)

    def _next(self, shape: list[int], place: Placement, rate: float, *, split: bool) -> Tensor:
        """The next mask from the stream that fits this placement."""
        with self.streams.fork(MODEL_PARALLEL if split or "tp" in place.axes else DEFAULT) as generator:
            return torch.rand(shape, generator=generator, dtype=torch.float32) >= rate


class _Dropped(torch.autograd.Function):
    """x * mask / (1 - p), without saved tensors in the graph.

    A saved tensor here would start the recomputation of a layer. Its last linear starts it, as a module does in
    InternEvo.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, keep: Tensor, kept: float) -> Tensor:
        ctx.keep, ctx.kept = keep, kept
        return x * keep / kept

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient / ctx.kept * ctx.keep, None, None
