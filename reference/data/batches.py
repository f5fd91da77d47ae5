"""A case to the micro-batches of every data rank: tokens, labels, loss mask, positions and borders of sentences.

Letters: B sequences of a micro-batch, S tokens of a sequence, T = B * S. The corpus is one endless stream of tokens
(`reference.data.corpus`). Micro-batch number n (steps outermost, data ranks innermost) reads the T tokens of window n,
and the one after them as a last label.

    packed                      one row of T tokens by `build_pack`; sentences of up to 5/4 S, positions restart
    internlm2, llama unpacked   a sentence a row by `build_unpack`, filled with token 0 and label -100 up to S
    gpt, opt unpacked           full rows of the stream, every label the next token (Megatron's rows)

So that a mean over ranks differs from a mean over tokens, every micro-batch of a step has another number of valid
tokens. The numbers go from 3/4 T down in equal steps, as far as the sentences allow, but at least one. The first rows
count more than the last. The other labels are -100 or masked; the mask of tokens without a label is random. Prompts
(negative ids) are read and not learned.

A range of rows that is one row too short or too long shows only at the ids at the edges of vocabulary shards. So the
first and last real id of every shard are mixed into the built-in corpus. These are the edges of 2 to 8 equal shards, if
the vocabulary splits or is padded that way, so the data do not change with tp and wp; other edges of this case's own
shards come last. In every step each edge id replaces one token of text, is read, and is a label that counts. The first
micro-batches of a step hold them; where a step is too small for all, the next step goes on with the others. Data that a
user names stay as they are.

Packs and rows are made by InternEvo's data path as pure functions. A sentence is an int64 tensor [tokens]; a label is
the next token of its sentence, IGNORED (-100) where there is none. Padding is token 0 with label -100. A negative token
is a prompt.

Sources: the InternEvo page "Data Load and Procedure" and EVO `data/tokenized/packed_dataset.py`, `collaters.py`,
`data/utils.py`. Where page and code disagree, no token is lost here: the last tokens are kept (page), and tokens beyond
a row are the next row (neither). A label 0 is learned as any other token (page).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, product

import torch
from torch import Tensor

from shardproof.reference.case import Case
from shardproof.reference.checkpoints.foreign import steps_before
from shardproof.reference.data.corpus import Source, mix_seed, sources, stream_of

IGNORED = -100
"""The label of a token that is not learned."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Rows of tokens before anything is masked: `tokens`, `labels` and `positions` int64 [B, S]; prompts are negative.

    A pack is one row, [1, P]. Its `cu_seqlens` int64 [sub-sequences + 1], from 0 to P, are the borders of
    sub-sequences, which attend to themselves only. Positions count within a sub-sequence.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    cu_seqlens: Tensor | None


def build_pack(sentences: Sequence[Tensor], *, packed_length: int, seq_len: int) -> list[Rows]:
    """All packs of these sentences, filled without a gap; at least one token.

    A sentence that crosses the end of a pack is cut, and its last label there is its own next token. The rest begins
    the next pack as a sub-sequence of its own. A piece longer than seq_len is cut into sub-sequences of seq_len tokens,
    with labels across the cuts. Padding is one more sub-sequence, which may be longer than seq_len. Empty sentences
    leave no trace.
    """
    tokens = torch.cat(list(sentences))
    ends = sorted({*accumulate(map(len, sentences))} - {0})
    labels = _next_tokens(tokens)
    labels[torch.tensor(ends, device=tokens.device) - 1] = IGNORED
    packs = []
    for start in range(0, len(tokens), packed_length):
        stop = min(start + packed_length, len(tokens))
        edges = [*(end - start for end in ends if start < end < stop), stop - start]
        packs.append(_pack(tokens[start:stop], labels[start:stop], edges, packed_length, seq_len))
    return packs


def _pack(tokens: Tensor, labels: Tensor, edges: list[int], packed_length: int, seq_len: int) -> Rows:
    """The pack of the pieces that end at these edges, with its padding."""
    borders = [0]
    for edge in edges:
        borders += [*range(borders[-1] + seq_len, edge, seq_len), edge]
    padding = packed_length - len(tokens)
    if padding:
        tokens = torch.cat((tokens, tokens.new_zeros(padding)))
        labels = torch.cat((labels, labels.new_full((padding,), IGNORED)))
        borders = [*borders, packed_length]
    cu_seqlens = torch.tensor(borders, dtype=torch.int64, device=tokens.device)
    starts = cu_seqlens[:-1].repeat_interleave(cu_seqlens.diff())
    indexes = torch.arange(packed_length, device=tokens.device) - starts
    return Rows(tokens=tokens[None], labels=labels[None], positions=indexes[None], cu_seqlens=cu_seqlens)


def build_unpack(sentences: Sequence[Tensor], *, micro_bsz: int, seq_len: int) -> Rows:
    """The first micro_bsz rows of these sentences, a sentence a row; positions count through the padding.

    A sentence longer than seq_len goes on in the next row, with labels across the cut. Empty sentences leave no trace.
    """
    pieces = [
        piece
        for sentence in sentences
        if len(sentence)
        for piece in zip(sentence.split(seq_len), _next_tokens(sentence).split(seq_len), strict=True)
    ]
    tokens = torch.zeros((micro_bsz, seq_len), dtype=torch.int64, device="cpu")
    labels = torch.full_like(tokens, IGNORED)
    for row, (piece, after) in enumerate(pieces[:micro_bsz]):
        tokens[row, : len(piece)] = piece
        labels[row, : len(piece)] = after
    positions = torch.arange(seq_len, device="cpu").repeat(micro_bsz, 1)
    return Rows(tokens=tokens, labels=labels, positions=positions, cu_seqlens=None)


def without_prompts(tokens: Tensor, labels: Tensor, padding: int = IGNORED) -> tuple[Tensor, Tensor]:
    """Tokens and labels as the model reads and learns them: prompts by their absolute values, and never learned.

    A label that is not learned becomes `padding`.
    """
    return tokens.abs(), torch.where(labels >= 0, labels, padding)


def _next_tokens(tokens: Tensor) -> Tensor:
    """Every token's successor, -100 at the end."""
    return torch.cat((tokens[1:], tokens.new_full((1,), IGNORED)))


_RANGES = 3
"""The most ranges of unread rows that are named."""
_PARTS = (2, 4, 8, 3, 6, 5, 7)
"""Numbers of shards, the usual ones first: small data get as many edges as fit, in this order."""
_PADDED_TO = 128
"""A shard of the padded vocabulary is a multiple of this many rows (Megatron)."""


def own_edges(case: Case) -> tuple[int, ...]:
    """First and last id of every shard of this case, over tp (logits, tables) and over wp (weights of isp), sorted."""
    sizes = {case.padded_vocab // parts for parts in (case.tp, case.wp)}
    return tuple(sorted({edge for size in sizes for edge in _edges(case.vocab, size)}))


@lru_cache(maxsize=8)
def unread_rows(case: Case) -> tuple[str, ...]:
    """One line that names the rows of the token table that no input looks up, with edges of shards; () if none."""
    places = product(range(case.steps), range(case.micro), range(case.dp))
    looked_up = {token for place in places for token in micro_batch(case, *place).tokens.flatten().tolist()}
    rows = [row for row in range(case.vocab) if row not in looked_up]
    if not rows:
        return ()
    ranges: list[list[int]] = []
    for row in rows:
        if ranges and ranges[-1][-1] == row - 1:
            ranges[-1][1:] = [row]
        else:
            ranges.append([row])
    named = ", ".join("-".join(map(str, ends)) for ends in ranges[:_RANGES])
    more = f" and {len(ranges) - _RANGES} ranges more" if len(ranges) > _RANGES else ""
    edges = sorted({*own_edges(case)} - looked_up)
    at_edges = f", first or last of a shard: {', '.join(map(str, edges[:8]))}" if edges else ""
    return (f"embedding.tokens.weight rows {named}{more} ({len(rows)} of {case.vocab} rows never looked up{at_edges})",)


def shard_edges(case: Case) -> tuple[int, ...]:
    """Every id to mix in, without repeats, the most usual splits first."""
    return _usual(case.vocab, case.family == "gpt", own_edges(case))


@lru_cache(maxsize=64)
def _usual(vocab: int, is_padded: bool, own: tuple[int, ...]) -> tuple[int, ...]:
    found: list[int] = []
    for parts in _PARTS:
        if is_padded:
            found += _edges(vocab, -(-vocab // (_PADDED_TO * parts)) * _PADDED_TO)
        elif vocab % parts == 0:
            found += _edges(vocab, vocab // parts)
    return tuple(dict.fromkeys([*found, *own]))


def _edges(vocab: int, size: int) -> list[int]:
    """The first and last real id of every shard of `size` rows that has one."""
    return [edge for first in range(0, vocab, size) for edge in (first, min(first + size, vocab) - 1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """A micro-batch of one data rank. Fields are [B, S]; packed [1, T].

    tokens, labels (-100 = not learned), positions: int64. loss_mask: float32, 0 or 1. A token counts where the mask is
    1 and its label is not -100. cu_seqlens: int64 [n + 1] borders of sub-sequences, None when not packed. `tokens` is
    a non-contiguous view when B > 1, as slices of a larger batch are. The batch is micro-batch `number` of its `step`.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    loss_mask: Tensor
    cu_seqlens: Tensor | None
    step: int = 0
    number: int = 0

    @property
    def counted(self) -> Tensor:
        """A mask of the tokens that count in the loss, bool, in the shape of the labels."""
        return (self.loss_mask == 1) & (self.labels != IGNORED)


def micro_batch(
    case: Case, step: int, micro: int, dp_rank: int, *, device: torch.device | str = "cpu", padding: int = IGNORED
) -> Batch:
    """Micro-batch `micro` of step `step` on data rank `dp_rank`: a pure function of the case and its corpus.

    `padding` is the label of prompts and padding. If the case loads a checkpoint, its steps follow those that were run
    before. The batch is number `micro * dp + dp_rank` of the step, the same for every dp and micro of one product.
    Neither the mode nor tp, wp, pp or cp changes it, up to 8 shards. Raises DataError when the corpus cannot be read,
    ValueError without such a micro-batch.
    """
    for name, value, limit in (("step", step, math.inf), ("micro", micro, case.micro), ("dp_rank", dp_rank, case.dp)):
        if not 0 <= value < limit:
            raise ValueError(f"{name}={value}: must lie in [0, {limit}); legal: {name}=0")
    at, number = steps_before(case) + step, micro * case.dp + dp_rank
    made = _make_batch(case, sources(case), at, number, padding)
    # every second column of a wider tensor: contiguous nowhere, on any device
    tokens = torch.stack((made.tokens, made.labels), dim=-1).to(device)[..., 0]
    return replace(
        made,
        tokens=tokens if case.batch > 1 else tokens.contiguous(),
        labels=made.labels.to(device, copy=True),
        positions=made.positions.to(device, copy=True),
        loss_mask=made.loss_mask.to(device, copy=True),
        cu_seqlens=None if made.cu_seqlens is None else made.cu_seqlens.to(device, copy=True),
        step=step,
    )


@lru_cache(maxsize=128)
def _make_batch(case: Case, _files: tuple[Source, ...], at: int, number: int, padding: int) -> Batch:
    """Micro-batch `number` of step `at`, on the CPU; not to be written to.

    Every rank and the dense model read it, so it is made once for the current files of the corpus.
    """
    edges = _mixed_in(case, at).get(number)
    window, is_end = _window(case, at, number)
    if edges is not None:
        window = window.flatten().scatter(0, edges.places, edges.ids).view_as(window)
    rows = _rows(case, window, is_end)
    tokens, labels = without_prompts(rows.tokens, rows.labels, padding)
    generator = torch.Generator(device="cpu").manual_seed(mix_seed(case.seed, at, number, 0))
    counted = None if edges is None else edges.labels
    labels, loss_mask = _mask_labels(labels, _valid_count(case, number), counted, generator)
    return Batch(
        tokens=tokens,
        labels=labels,
        positions=rows.positions,
        loss_mask=loss_mask,
        cu_seqlens=rows.cu_seqlens,
        number=number,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Edges:
    """Edge ids of one micro-batch: `ids` int64 [n], their `places` in the window and, as labels, in the rows (flat)."""

    ids: Tensor
    places: Tensor
    labels: Tensor


@lru_cache(maxsize=64)
def _mixed_in(case: Case, step: int) -> dict[int, _Edges]:
    """The edge ids of a step and their places, by the number of the micro-batch; empty for a user's own data."""
    found: dict[int, _Edges] = {}
    edges = shard_edges(case) if not case.data else ()
    first = (
        step * sum(len(document.ids) for document in _mixed_in(case, 0).values()) % len(edges) if edges and step else 0
    )
    left = [*edges[first:], *edges[:first]]
    for number in range(case.micro * case.dp):
        if not left:
            break
        window, is_end = _window(case, step, number)
        places = torch.arange(window.numel(), device="cpu")
        rows = _rows(case, 1 + places.view_as(window), is_end)  # where each place of the window ends up
        free = places[torch.isin(1 + places, rows.tokens.flatten()) & torch.isin(1 + places, rows.labels.flatten())]
        count = min(_most_valid(int((rows.labels >= 0).sum()), _valid_count(case, number)), len(free), len(left))
        if not count:
            continue
        chosen = free[torch.arange(count, device="cpu") * len(free) // count]
        lies_at = (rows.labels.flatten() == 1 + chosen[:, None]).int().argmax(1)
        found[number] = _Edges(ids=torch.tensor(sorted(left[:count]), device="cpu"), places=chosen, labels=lies_at)
        left = left[count:]
    return found


def _window(case: Case, step: int, number: int) -> tuple[Tensor, Tensor]:
    """The text of micro-batch `number` of a step and where sentences end: [B, S + 1] for full rows, else [1, T + 1]."""
    number += step * case.micro * case.dp
    if case.full_rows:
        return stream_of(case).windows(number * case.batch, case.batch, case.seq)
    return stream_of(case).windows(number, 1, case.tokens)


def _rows(case: Case, window: Tensor, is_end: Tensor) -> Rows:
    """A window in this case's form: packed, a sentence a row, or full rows."""
    if case.full_rows:
        window = window if int(window[:, 1:].max()) >= 0 else window.abs()
        positions = torch.arange(case.seq, device="cpu").repeat(case.batch, 1)
        return Rows(tokens=window[:, :-1], labels=window[:, 1:], positions=positions, cu_seqlens=None)
    text = window[0]
    # if nothing would be learned: as one sentence, and finally with prompts as text
    for sentences in (text.tensor_split(is_end[0].nonzero()[:, 0] + 1), (text,), (text.abs(),)):
        if case.packed:
            rows = build_pack(sentences, packed_length=case.tokens, seq_len=case.seq)[0]
        else:  # T + 1 tokens fill at least B rows, however few sentences they are
            rows = build_unpack(sentences[: case.batch], micro_bsz=case.batch, seq_len=case.seq)
        if int(rows.labels.max()) >= 0:
            break
    return rows


def _valid_count(case: Case, number: int) -> int:
    """The number of valid tokens of micro-batch `number` of a step: different for each, at least 1."""
    most = max(1, 3 * (case.tokens - 1) // 4)
    return most - number * max(1, most // (case.micro * case.dp)) % most


def _most_valid(learned: int, wanted: int) -> int:
    """The number of learned tokens that make `wanted` valid ones possible: some are masked or lose their labels."""
    return min(wanted, max(1, _labels_to_keep(learned) - 1))


def _labels_to_keep(learned: int) -> int:
    """The number of learned tokens that keep their labels: all but one in eight, at least one."""
    return learned - min(1 + learned // 8, learned - 1)


def _mask_labels(
    labels: Tensor, valid_count: int, counted: Tensor | None, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Labels and loss mask of rows [B, S] in which `valid_count` tokens are valid, or nearly all that can be.

    Among the tokens to learn, those `counted` (places in the flat rows) come first, then others in a random order that
    prefers the first rows. In this order the first tokens are valid, the next are masked, and the last, one in eight,
    lose their labels.
    """
    flat = labels.flatten()
    preference = torch.arange(1, 1 + len(labels), device="cpu")[:, None]
    drawn = torch.rand((2, *labels.shape), generator=generator, dtype=torch.float32, device="cpu")
    chance = (drawn[0] * preference).flatten()
    order = (chance if counted is None else chance.index_fill(0, counted, -1.0)).argsort()
    learned = order[flat[order] != IGNORED]
    kept = _labels_to_keep(len(learned))
    flat[learned[kept:]] = IGNORED
    mask = drawn[1].round().flatten()
    mask[learned[:kept]] = 0
    mask[learned[: _most_valid(len(learned), valid_count)]] = 1
    return flat.view_as(labels), mask.view_as(labels)
