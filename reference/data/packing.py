"""Sentences to packs, packs to what a forward pass reads: InternEvo's data path as pure functions.

Letters: P packed_length = micro_bsz * seq_len, M micro-batches (`micro_num`). A sentence is an int64 tensor [tokens];
a label is the next token of its sentence, IGNORED (-100) where there is none. `cu_seqlens` holds the borders of the
sub-sequences of a pack, which attend to themselves only; `indexes` is a token's position in its sub-sequence. Padding
is token 0, label -100, and one more sub-sequence, which may be longer than seq_len.

Sources: the InternEvo page "Data Load and Procedure" and EVO `data/tokenized/packed_dataset.py`, `collaters.py`,
`data/utils.py`. Where page and code disagree, the default is the one that loses nothing; the other is an option:

    build_pack    tail    "pad" (page) keeps the last tokens; "drop" (code) loses up to P - 1 of them
    build_unpack  packs   "stride" (page) uses a sentence once; "overlap" (code since 2024-08) micro_bsz times
                  excess  "discard" (page and code) loses what exceeds seq_len; "carry" makes it the next sentence
    collate       zero    "learn" label 0 as any other token; "ignore" (code) never learns it
                  cu_seqlens  "list" (page's text) always; "stack" (page's print, code) a tensor when lengths agree
    unpack_data   indexes "rows" a position for every row; "first" (code since 2024-09) only those of row 0, which
                  gives longer rows wrong positions; "drop" (page) none
    split_data_sequence_parallel  labels  "split" (page); "whole" (code) for a head that restores the sequence
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor

IGNORED = -100
"""The label of a token that is not learned."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pack:
    """A packed sample: `tokens`, `labels`, `indexes` int64 [P], `cu_seqlens` int64 [sub-sequences + 1] from 0 to P.

    A negative token is a prompt (see `collate`).
    """

    tokens: Tensor
    labels: Tensor
    cu_seqlens: Tensor
    indexes: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """Input of the model, without labels. A field is None once a function has removed it.

    From `collate`: input_ids and indexes [M, P], cu_seqlens M tensors. Normalised: [1, P], [P], one tensor and the
    length of the longest sub-sequence. Unpacked: [micro_bsz, seq_len] both, no cu_seqlens.
    """

    input_ids: Tensor
    indexes: Tensor | None
    cu_seqlens: Tensor | tuple[Tensor, ...] | None
    max_seqlen: int | None = None


Process = Callable[[Data, Tensor], tuple[Data, Tensor]]
"""InternEvo's `data_process_func`: a micro-batch and its labels to what the model reads."""


def build_pack(
    sentences: Sequence[Tensor], *, packed_length: int, seq_len: int, tail: Literal["pad", "drop"] = "pad"
) -> list[Pack]:
    """All packs of these sentences, filled without a gap.

    A sentence that crosses the end of a pack is cut: its last label there is its own next token. The rest begins the
    next pack as a sub-sequence of its own. A piece above seq_len is cut into sub-sequences of seq_len tokens, its
    labels running through the cuts. Empty sentences leave no trace. Raises ValueError for sizes below 1.
    """
    _require_sizes(packed_length=packed_length, seq_len=seq_len)
    sentences = [sentence for sentence in sentences if sentence.numel()]
    if not sentences:
        return []
    tokens = torch.cat(list(sentences))
    ends = list(accumulate(sentence.numel() for sentence in sentences))
    labels = _next_tokens(tokens)
    labels[torch.tensor(ends, device=tokens.device) - 1] = IGNORED
    packs, first_end = [], 0
    last = len(tokens) - packed_length + 1 if tail == "drop" else len(tokens)
    for start in range(0, last, packed_length):
        stop = min(start + packed_length, len(tokens))
        edges = []
        while first_end < len(ends) and ends[first_end] <= stop:
            edges.append(ends[first_end] - start)
            first_end += 1
        if not edges or edges[-1] < stop - start:
            edges.append(stop - start)
        packs.append(_pack(tokens[start:stop], labels[start:stop], _cut(edges, seq_len), packed_length))
    return packs


def build_unpack(
    sentences: Sequence[Tensor],
    *,
    micro_bsz: int,
    seq_len: int,
    packs: Literal["stride", "overlap"] = "stride",
    excess: Literal["discard", "carry"] = "discard",
    tail: Literal["pad", "drop"] = "pad",
) -> list[Pack]:
    """Packs of micro_bsz sentences of at most seq_len tokens each, to be laid out as rows by `unpack_data`.

    packs="stride": pack i holds sentences i * micro_bsz and on; "overlap": sentences i and on, one pack a sentence.
    excess="discard": tokens beyond seq_len are lost, and the label of the last kept token is -100. excess="carry": they
    are the next sentence, and that label is its first token. tail="drop" leaves out packs of fewer than micro_bsz
    sentences. Empty sentences leave no trace. Raises ValueError for sizes below 1.
    """
    _require_sizes(micro_bsz=micro_bsz, seq_len=seq_len)
    pieces: list[tuple[Tensor, Tensor]] = []
    for sentence in sentences:
        tokens = sentence[:seq_len] if excess == "discard" else sentence
        if len(tokens):
            pieces += zip(tokens.split(seq_len), _next_tokens(tokens).split(seq_len), strict=True)
    built = []
    for start in range(0, len(pieces), micro_bsz if packs == "stride" else 1):
        chosen = pieces[start : start + micro_bsz]
        if tail == "drop" and len(chosen) < micro_bsz:
            break
        tokens, labels = (torch.cat(parts) for parts in zip(*chosen, strict=True))
        edges = list(accumulate(len(piece) for piece, _ in chosen))
        built.append(_pack(tokens, labels, [0, *edges], micro_bsz * seq_len))
    return built


def collate(
    packs: Sequence[Pack], *, zero: Literal["learn", "ignore"] = "learn", cu_seqlens: Literal["list", "stack"] = "list"
) -> tuple[Data, Tensor]:
    """The packs of one step as one batch: Data with [M, P] fields, and labels int64 [M, P].

    A negative token is a prompt, which the model reads as its absolute value and never learns. Where a prompt is the
    label, the label becomes -100. Raises ValueError for no packs or packs of unequal length.
    """
    lengths = sorted({pack.tokens.numel() for pack in packs})
    _require(len(lengths) == 1, "packs", lengths, "must be at least one pack, all of one length", "two packs of 16")
    raw = torch.stack([pack.labels for pack in packs])
    labels = torch.where(raw >= (0 if zero == "learn" else 1), raw, IGNORED)
    borders = [pack.cu_seqlens for pack in packs]
    stacked = cu_seqlens == "stack" and len({len(row) for row in borders}) == 1
    data = Data(
        input_ids=torch.stack([pack.tokens for pack in packs]).abs(),
        indexes=torch.stack([pack.indexes for pack in packs]),
        cu_seqlens=torch.stack(borders) if stacked else tuple(borders),
    )
    return data, labels


def packed_data_normalizer(data: Data, label: Tensor) -> tuple[Data, Tensor]:
    """Normalise a packed micro-batch: indexes [P], cu_seqlens [n + 1], and the longest sub-sequence's length.

    max_seqlen counts the padding too, as InternEvo does: it must bound every position. Raises ValueError when `data`
    holds more than one pack or is not packed.
    """
    indexes, cu_seqlens = _one_pack(data)
    max_seqlen = int(cu_seqlens.diff().max())
    return replace(data, indexes=indexes, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen), label


def unpack_data(
    data: Data, label: Tensor, *, micro_bsz: int, seq_len: int, indexes: Literal["rows", "first", "drop"] = "rows"
) -> tuple[Data, Tensor]:
    """Lay a micro-batch of `build_unpack` out as rows: input_ids, indexes and labels [micro_bsz, seq_len].

    Row i is sentence i, filled with token 0, index 0 and label -100. Rows without a sentence are padding; InternEvo
    lays the pack's own padding into the first of them, and stops when that is longer than seq_len. Raises ValueError
    when the rows cannot hold the pack.
    """
    _require_sizes(micro_bsz=micro_bsz, seq_len=seq_len)
    indexes_P, cu_seqlens = _one_pack(data)
    borders = torch.cat((cu_seqlens, cu_seqlens[-1:].expand(micro_bsz)))[: micro_bsz + 1, None]
    places = borders[:-1] + torch.arange(seq_len, device=borders.device)
    in_row = places < borders[1:]
    filling = label.new_tensor([0, IGNORED, 0])[:, None]
    fields = torch.stack((data.input_ids[0], label[0], indexes_P))
    rows = torch.where(in_row, fields[:, places.clamp(max=fields.shape[1] - 1)], filling[..., None])
    lost = int((fields != filling)[:2].sum() - (rows != filling[..., None])[:2].sum())
    rule = f"{lost} tokens and labels do not fit into rows of seq_len={seq_len}"
    _require(not lost, "micro_bsz", micro_bsz, rule, "the sizes that build_unpack was called with")
    kept = {"rows": rows[2], "first": rows[2, 0], "drop": None}[indexes]
    return Data(input_ids=rows[0], indexes=kept, cu_seqlens=None, max_seqlen=seq_len), rows[1]


def load_accum_batch(
    data: Data, label: Tensor, *, micro: int, micro_size: int = 1, process: Process = packed_data_normalizer
) -> tuple[Data, Tensor]:
    """Micro-batch number `micro` of a step's batch, processed (InternEvo `_load_accum_batch`, its offset an argument).

    Takes rows micro * micro_size up to (micro + 1) * micro_size of every field; micro_size is 1 for packed data.
    Raises ValueError when the batch has no such rows.
    """
    rows = slice(micro * micro_size, (micro + 1) * micro_size)
    count = len(data.input_ids)
    _require(0 <= rows.start < rows.stop <= count, "micro", micro, f"the batch has {count} rows", "micro=0")
    borders = data.cu_seqlens
    loaded = replace(
        data,
        input_ids=data.input_ids[rows],
        indexes=None if data.indexes is None else data.indexes[rows],
        cu_seqlens=None if borders is None else borders[rows],
    )
    return process(loaded, label[rows])


def split_data_sequence_parallel(
    data: Data, label: Tensor, *, rank: int, size: int, labels: Literal["split", "whole"] = "split"
) -> tuple[Data, Tensor]:
    """The slice of sequence rank `rank` of `size`: input_ids, indexes and labels cut along their last dim.

    cu_seqlens and max_seqlen stay whole: attention sees the whole sequence again. Size 1 changes nothing. Raises
    ValueError when the sequence does not split evenly.
    """
    length = data.input_ids.shape[-1]
    _require(size > 0 and length % size == 0, "size", size, f"must divide the {length} tokens of a row", "size=1")
    _require(0 <= rank < size, "rank", rank, f"must be below size={size}", "rank=0")
    part = slice(rank * length // size, (rank + 1) * length // size)
    indexes = None if data.indexes is None else data.indexes[..., part]
    mine = replace(data, input_ids=data.input_ids[..., part], indexes=indexes)
    return mine, label[..., part] if labels == "split" else label


def _next_tokens(tokens: Tensor) -> Tensor:
    """Every token's successor, -100 at the end."""
    return torch.cat((tokens[1:], tokens.new_full((min(1, len(tokens)),), IGNORED)))


def _cut(edges: Sequence[int], seq_len: int) -> list[int]:
    """0, the edges, and a border every seq_len tokens between two of them."""
    borders = [0]
    for edge in edges:
        borders += [*range(borders[-1] + seq_len, edge, seq_len), edge]
    return borders


def _pack(tokens: Tensor, labels: Tensor, borders: list[int], packed_length: int) -> Pack:
    """The pack with these sub-sequences, its padding added."""
    padding = packed_length - len(tokens)
    if padding:
        tokens = torch.cat((tokens, tokens.new_zeros(padding)))
        labels = torch.cat((labels, labels.new_full((padding,), IGNORED)))
        borders = [*borders, packed_length]
    cu_seqlens = torch.tensor(borders, dtype=torch.int64, device=tokens.device)
    starts = cu_seqlens[:-1].repeat_interleave(cu_seqlens.diff())
    indexes = torch.arange(packed_length, device=tokens.device) - starts
    return Pack(tokens=tokens, labels=labels, cu_seqlens=cu_seqlens, indexes=indexes)


def _one_pack(data: Data) -> tuple[Tensor, Tensor]:
    """Indexes [P] and cu_seqlens [n + 1] of a batch that must hold one pack."""
    indexes, borders = data.indexes, data.cu_seqlens
    _require(len(data.input_ids) == 1, "input_ids", tuple(data.input_ids.shape), "must be one pack", "shape (1, 16)")
    if indexes is None or borders is None:
        raise ValueError("cu_seqlens=None: the data are not packed; legal: a batch of collate")
    return indexes[0], borders[0]


def _require(legal: bool, name: str, value: object, rule: str, example: str) -> None:
    if not legal:
        raise ValueError(f"{name}={value}: {rule}; legal: {example}")


def _require_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        _require(size > 0, name, size, "must be at least 1", f"{name}=8")
