"""The examples that InternEvo's page "Data Load and Procedure" prints, as literals, and what our code makes of them.

micro_bsz 2, SEQ_LEN 8, packed_length 16, as on the page. Values that the page leaves out are added, by hand from the
rules. The ids of text are by hand too. A byte is its own id up to 257 tokens; 100 tokens fold by modulo. 509 tokens
spread by 314, the first number from 0.618 * 509 on without a common factor.
"""

from functools import lru_cache

import torch
from torch import Tensor

from shardproof.reference.data.batches import build_pack, build_unpack, without_prompts
from shardproof.reference.data.corpus import Stream
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
    packs = build_pack(_sentences(_PACKED), packed_length=16, seq_len=8)
    borders = torch.cat([pack.cu_seqlens for pack in packs if pack.cu_seqlens is not None])
    rows = build_unpack(_sentences(_PACKED), micro_bsz=2, seq_len=8)
    (long,) = build_pack([torch.arange(1, 11, device="cpu")], packed_length=12, seq_len=4)
    assert long.cu_seqlens is not None
    cut = build_unpack([torch.arange(1, 11, device="cpu")], micro_bsz=2, seq_len=4)
    (prompt,) = build_pack(_sentences([[5, -6, 0, 8]]), packed_length=4, seq_len=4)
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


def _sentences(rows: list[list[int]]) -> list[Tensor]:
    return [torch.tensor(row, device="cpu") for row in rows]


def _pair(found: Tensor, literal: object) -> tuple[Tensor, Tensor]:
    return found, torch.tensor(literal, device="cpu")
