"""Anchors of a case's data, whatever code makes them: the oracle of all that truth and ranks read alike.

The dense model and the ranks take their micro-batches from the same functions, so that an error there moves both. The
statements of this module are made beside those functions. They are the examples that InternEvo's page prints, as
literals (`examples`), and the batches of the first and the last step. These are written out token by token from
`reference.data.corpus` and `reference.data.batches`. Each is a pair of tensors that must be equal.

Letters: B sequences of a micro-batch, S tokens of a sequence, T = B * S.

In the examples micro_bsz is 2, SEQ_LEN 8 and packed_length 16, as on the page. Values that the page leaves out are
added, by hand from the rules. The ids of text are by hand too. A byte is its own id up to 257 tokens; 100 tokens fold
by modulo. 509 tokens spread by 314, the first number from 0.618 * 509 on without a common factor.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from shardproof.reference.case import Case
from shardproof.reference.checkpoints.foreign import steps_before
from shardproof.reference.data import corpus
from shardproof.reference.data.batches import (
    IGNORED,
    Batch,
    build_pack,
    build_unpack,
    micro_batch,
    shard_edges,
    without_prompts,
)
from shardproof.reference.data.corpus import Stream, stream_of
from shardproof.reference.data.readers import encode

Pairs = dict[str, tuple[Tensor, Tensor]]
"""Statement -> (what the code under test gives, what it must give)."""

_A = [2323, 442, 252, 341]
_B = [233, 3442, 322, 31, 2514, 49731, 51]
_C = [4326, 427, 465, 22, 314, 9725, 346, 1343]
_PACKED = [_A, _B, _C, [24, 2562, 5, 25, 356]]
_N = -100
_PACKED_TOKENS = [
    [2323, 442, 252, 341, 233, 3442, 322, 31, 2514, 49731, 51, 4326, 427, 465, 22, 314],
    [9725, 346, 1343, 24, 2562, 5, 25, 356, 0, 0, 0, 0, 0, 0, 0, 0],
]
_PACKED_LABELS = [
    [442, 252, 341, _N, 3442, 322, 31, 2514, 49731, 51, _N, 427, 465, 22, 314, 9725],
    [346, 1343, _N, 2562, 5, 25, 356, _N, _N, _N, _N, _N, _N, _N, _N, _N],
]
_PACKED_INDEXES = [[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4], [0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6, 7]]
_PACKED_BORDERS = [0, 4, 11, 16, 0, 3, 8, 16]
_ROWS = [[2323, 442, 252, 341, 0, 0, 0, 0], [233, 3442, 322, 31, 2514, 49731, 51, 0]]
_ROW_LABELS = [[442, 252, 341, _N, _N, _N, _N, _N], [3442, 322, 31, 2514, 49731, 51, _N, _N]]


@lru_cache(maxsize=1)
def examples() -> Pairs:
    """Every printed example of packing and unpacking, and what the page leaves out, by hand.

    Shared by all callers: not to be written to.
    """
    packs = build_pack(_as_tensors(_PACKED), packed_length=16, seq_len=8)
    borders = torch.cat([pack.cu_seqlens for pack in packs if pack.cu_seqlens is not None])
    rows = build_unpack(_as_tensors(_PACKED), micro_bsz=2, seq_len=8)
    (long,) = build_pack([torch.arange(1, 11, device="cpu")], packed_length=12, seq_len=4)
    assert long.cu_seqlens is not None
    cut = build_unpack([torch.arange(1, 11, device="cpu")], micro_bsz=2, seq_len=4)
    (prompt,) = build_pack(_as_tensors([[5, -6, 0, 8]]), packed_length=4, seq_len=4)
    tokens, labels = without_prompts(prompt.tokens, prompt.labels)
    is_end = torch.zeros(4, dtype=torch.bool, device="cpu")
    short = Stream(ids=torch.arange(1, 5, device="cpu"), is_end=is_end, origin=3)
    return {
        "printed packs": _pair(torch.cat([pack.tokens for pack in packs]), _PACKED_TOKENS),
        "printed labels of packs": _pair(torch.cat([pack.labels for pack in packs]), _PACKED_LABELS),
        "printed cu_seqlens of packs": _pair(borders, _PACKED_BORDERS),
        "printed indexes of packs": _pair(torch.cat([pack.positions for pack in packs]), _PACKED_INDEXES),
        "printed rows": _pair(rows.tokens, _ROWS),
        "printed labels of rows": _pair(rows.labels, _ROW_LABELS),
        "labels of a sentence of 10 tokens": _pair(long.labels[0], [2, 3, 4, 5, 6, 7, 8, 9, 10, _N, _N, _N]),
        "cu_seqlens of a sentence of 10 tokens, cut at 4": _pair(long.cu_seqlens, [0, 4, 8, 10, 12]),
        "indexes of a sentence of 10 tokens, cut at 4": _pair(long.positions[0], [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 0, 1]),
        "rows of a sentence of 10 tokens, cut at 4": _pair(cut.tokens, [[1, 2, 3, 4], [5, 6, 7, 8]]),
        "labels of rows of a sentence of 10 tokens": _pair(cut.labels, [[2, 3, 4, 5], [6, 7, 8, 9]]),
        "tokens of a prompt": _pair(tokens, [[5, 6, 0, 8]]),
        "labels beside a prompt and of token 0": _pair(labels, [[_N, 0, 8, _N]]),
        "windows of 2 in a corpus of 4, from its last": _pair(
            short.windows(0, 3, 2)[0], [[4, 1, 2], [2, 3, 4], [1, 2, 3]]
        ),
        "ids of text in 257 tokens": _pair(encode(b"To be", 257), [84, 111, 32, 98, 101, 256]),
        "ids of text in 509 tokens": _pair(encode(b"AB", 509), [65 * 314 % 509, 66 * 314 % 509, 256 * 314 % 509]),
        "ids of text in 100 tokens": _pair(encode(b"Az", 100), [65, 22, 56]),
    }


def _as_tensors(rows: list[list[int]]) -> list[Tensor]:
    return [torch.tensor(row, device="cpu") for row in rows]


def _pair(found: Tensor, literal: object) -> tuple[Tensor, Tensor]:
    return found, torch.tensor(literal, device="cpu")


_SAMPLE_BYTES = 2048
"""Bytes of the first file whose ids are held against them."""
Rows = dict[tuple[int, int, int], Batch]
"""(step, micro-batch, data rank) -> what it reads."""


def anchors(case: Case) -> Pairs:
    """Statement on this case's data -> two tensors that must be equal."""
    read = {
        (step, micro, rank): micro_batch(case, step, micro, rank)
        for step in range(case.steps)
        for micro in range(case.micro)
        for rank in range(case.dp)
    }
    return examples() | _text(case) | _sentences(case) | _written_out(case, read) | _counted(case, read)


def _text(case: Case) -> Pairs:
    """Plain text is one id a byte, another id for every other byte, and an end that is no byte."""
    source, read = corpus.sources(case)[0], corpus.read(corpus.sources(case), case.vocab)
    pairs = {"tokens of the corpus": _numbers(sum(read.lengths), len(read.ids))}
    if source.index or Path(source.path).suffix == ".jsonl" or case.vocab <= 256:
        return pairs
    with Path(source.path).open("rb") as file:
        text = file.read(_SAMPLE_BYTES)
    ids = read.ids[: len(text)].tolist()
    end = int(read.ids[read.lengths[0] - 1])
    kinds = [len(set(text)), len(set(ids)), len(set(zip(text, ids, strict=True)))]
    return pairs | {
        "bytes of the first document": _numbers(read.lengths[0], Path(source.path).stat().st_size + 1),
        "one id for every byte": _numbers(kinds, [kinds[0]] * 3),
        "the end of a document is no byte": _numbers(end in ids, False),
    }


def _sentences(case: Case) -> Pairs:
    """Every document ends a sentence, and no sentence is longer than 5/4 S."""
    stream, lengths = stream_of(case), corpus.read(corpus.sources(case), case.vocab).lengths
    last = torch.tensor(lengths, device="cpu").cumsum(0) - 1
    longest = int(stream.is_end.nonzero()[:, 0].diff(prepend=torch.tensor([-1], device="cpu")).max())
    limit = max(2, case.seq + case.seq // 4)
    return {
        "documents that end a sentence": _numbers(int(stream.is_end[last].sum()), len(lengths)),
        "tokens of the longest sentence": _at_most(longest, limit),
    }


def _written_out(case: Case, read: Rows) -> Pairs:
    """Tokens, labels, positions and borders of the batches of the first and the last step."""
    pairs: Pairs = {}
    before = steps_before(case)
    for (step, micro, rank), batch in read.items():
        if step not in (0, case.steps - 1):
            continue
        text, rows = _written(case, ((before + step) * case.micro + micro) * case.dp + rank)
        tokens, labels = batch.tokens.flatten().tolist(), batch.labels.flatten().tolist()
        must = rows.tokens(text, tokens, set() if case.data else set(shard_edges(case)))
        kept, learned = sum(label != IGNORED for label in labels), sum(place >= 0 for place in rows.labels)
        name = f"of step {step}, micro-batch {micro}, data rank {rank}"
        pairs[f"tokens {name}"] = _numbers(tokens, must)
        pairs[f"labels {name}"] = _numbers(labels, rows.true_labels(text, tokens, labels))
        pairs[f"tokens that lose their label {name}"] = _at_most(learned - kept, 1 + learned // 8 + rows.prompts(text))
        pairs[f"positions {name}"] = _numbers(batch.positions.flatten().tolist(), rows.positions)
        if batch.cu_seqlens is not None:
            pairs[f"cu_seqlens {name}"] = _numbers(batch.cu_seqlens.tolist(), rows.borders)
    return pairs


@dataclass(frozen=True, kw_only=True, slots=True)
class _Written:
    """The T tokens of a micro-batch by their places in its text.

    `read` and `labels` of each (-1: padding, no label), `positions`, and `borders` of sub-sequences.
    """

    read: list[int]
    labels: list[int]
    positions: list[int]
    borders: list[int]

    def tokens(self, text: list[int], found: list[int], edges: set[int]) -> list[int]:
        """Tokens that must be read, given those found: the text, but each edge id may replace its token once."""
        must = []
        for place, token in zip(self.read, found, strict=True):
            own = abs(text[place]) if place >= 0 else 0
            if token != own and token in edges and place >= 0:
                edges.remove(token)
                own = token
            must.append(own)
        return must

    def true_labels(self, text: list[int], tokens: list[int], found: list[int]) -> list[int]:
        """Labels that must be, given those left out (-100): the token that is read at the label's place."""
        read = {place: token for place, token in zip(self.read, tokens, strict=True) if place >= 0}
        learned = [read.get(at, text[at]) if at >= 0 and text[at] >= 0 else IGNORED for at in self.labels]
        return [IGNORED if label == IGNORED else must for label, must in zip(found, learned, strict=True)]

    def prompts(self, text: list[int]) -> int:
        """Labels that are prompts, which are not learned."""
        return sum(place >= 0 and text[place] < 0 for place in self.labels)


def _written(case: Case, number: int) -> tuple[list[int], _Written]:
    """The text of micro-batch `number` of the run, a stretch for every full row or one, and its tokens written out."""
    count, length = (case.batch, case.seq) if case.full_rows else (1, case.tokens)
    stream, text, ends = stream_of(case), list[int](), list[bool]()
    size = len(stream.ids)
    for window in range(number * count, (number + 1) * count):
        lap = window // (size // math.gcd(length, size))
        places = [(stream.origin + window * length + lap + token) % size for token in range(length + 1)]
        text += stream.ids[places].tolist()
        ends += stream.is_end[places].tolist()
    whole = [(0, len(text))]
    form = _full_rows if case.full_rows else _packed if case.packed else _a_sentence_a_row
    for spans in (whole if case.full_rows else _spans(ends), whole):
        written = form(case, spans)
        if any(place >= 0 and text[place] >= 0 for place in written.labels):
            return text, written
    return [abs(token) for token in text], written


def _full_rows(case: Case, spans: list[tuple[int, int]]) -> _Written:
    """B rows of S tokens; a row's text is one token longer, its last label."""
    read = [row * (case.seq + 1) + token for row in range(case.batch) for token in range(case.seq)]
    return _rows(case, read, [place + 1 for place in read])


def _spans(ends: list[bool]) -> list[tuple[int, int]]:
    """First and past-the-last place of every sentence."""
    edges = [0, *(place + 1 for place, is_end in enumerate(ends) if is_end), len(ends)]
    return [(first, last) for first, last in pairwise(edges) if last > first]


def _packed(case: Case, spans: list[tuple[int, int]]) -> _Written:
    """A row of T tokens: the next token of the same sentence is the label, positions restart every S tokens too."""
    labels, positions, borders = [], [], [0]
    for first, last in spans:
        for place in range(first, min(last, case.tokens)):
            labels.append(place + 1 if place + 1 < last else -1)
            position = (place - first) % case.seq
            positions.append(position)
            borders += [place] if position == 0 and place else []
    borders.append(case.tokens)
    return _Written(read=list(range(case.tokens)), labels=labels, positions=positions, borders=borders)


def _a_sentence_a_row(case: Case, spans: list[tuple[int, int]]) -> _Written:
    """The first B sentences, each cut into rows of up to S tokens through whose cuts labels run; B rows are kept."""
    read, labels = [], []
    for first, last in spans[: case.batch]:
        for start in range(first, last, case.seq):
            row = range(start, min(start + case.seq, last))
            padding = [-1] * (case.seq - len(row))
            read += [*row, *padding]
            labels += [*(place + 1 if place + 1 < last else -1 for place in row), *padding]
    missing = [-1] * (case.tokens - len(read))
    return _rows(case, [*read, *missing][: case.tokens], [*labels, *missing][: case.tokens])


def _rows(case: Case, read: list[int], labels: list[int]) -> _Written:
    """Rows whose positions count from 0 to S - 1, padding too."""
    return _Written(read=read, labels=labels, positions=[*range(case.seq)] * case.batch, borders=[])


def _counted(case: Case, read: Rows) -> Pairs:
    """Pairs about counted tokens: the loss mask is 0 or 1 and lets something count.

    The micro-batches of a step count different numbers of tokens (full rows of plain text, where their size allows).
    The ids at the edges of this case's shards are read and learned.
    """
    counts = {place: batch.counted for place, batch in read.items()}
    marks = torch.stack([batch.loss_mask.flatten() for batch in read.values()]).unique().tolist()
    pairs = {
        "loss mask beside 0 and 1": _numbers([mark for mark in marks if mark not in (0.0, 1.0)], []),
        "micro-batches that count no token": _numbers(
            [list(at) for at, where in counts.items() if not where.any()], []
        ),
    }
    of_step = [int(where.sum()) for (step, _, _), where in counts.items() if step == 0]
    if case.full_rows and not case.data and case.tokens >= 2 * len(of_step) + 2:
        pairs["different counts of tokens in step 0"] = _numbers(len(set(of_step)), len(of_step))
    edges = _edge_ids(case)
    # Of two tokens with the end of a sentence between them none is both read and learned.
    if not case.data and case.tokens > 2 and sum(of_step) >= 4 * len(shard_edges(case)):
        inputs = {
            token for (step, _, _), batch in read.items() if not step for token in batch.tokens.flatten().tolist()
        }
        labels = {t for at, where in counts.items() if not at[0] for t in read[at].labels[where].tolist()}
        pairs["edges of vocabulary shards that are no input in step 0"] = _numbers(sorted(edges - inputs), [])
        pairs["edges of vocabulary shards that are no label in step 0"] = _numbers(sorted(edges - labels), [])
    return pairs


def _edge_ids(case: Case) -> set[int]:
    """Ids that are the first or the last of a shard: those whose neighbour lies in another shard, or is none."""
    sizes = {case.padded_vocab // parts for parts in (case.tp, case.wp)}
    last = case.vocab - 1
    return {0, last} | {
        i for size in sizes for i in range(1, last) if (i - 1) // size < i // size or (i + 1) // size > i // size
    }


def _numbers(found: object, must: object) -> tuple[Tensor, Tensor]:
    return torch.tensor(found, device="cpu"), torch.tensor(must, device="cpu")


def _at_most(found: int, limit: int) -> tuple[Tensor, Tensor]:
    """A pair that is equal where `found` does not exceed the limit."""
    return _numbers(found, min(found, limit))
