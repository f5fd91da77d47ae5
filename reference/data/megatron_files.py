"""Megatron-Core's indexed data: `x.bin`, the tokens of all sequences, and `x.idx`, where each of them starts.

`.idx`, little endian: the magic bytes, u64 version 1, u8 code of the token type, u64 number of sequences, u64 number of
document borders. Then i32 lengths, i64 byte offsets, i64 borders (document k = the sequences from border k up to k +
1). Multimodal data have one i8 a sequence behind them, which is not read. Source: MEG
`core/datasets/indexed_dataset.py`.
"""

import struct
from pathlib import Path

import torch
from torch import Tensor

from reference.data.files import DataError, load
from reference.data.readers import MAX_DOCUMENTS

_MAGIC = b"MMIDIDX\x00\x00"
_HEAD = struct.Struct("<QBQQ")
_TYPES = {1: torch.uint8, 3: torch.int16, 4: torch.int32, 5: torch.int64, 8: torch.uint16}
_LEGAL = "the .idx that Megatron's builder wrote with this .bin"


def index_path(path: Path) -> Path:
    """Where the index of `x.bin` stands: `x.idx`."""
    return path.with_suffix(".idx")


def read_megatron(path: Path, vocab: int) -> list[Tensor]:
    """The documents of `path` (`x.bin`) as `x.idx` cuts them: int64, every id from 0 to vocab - 1.

    Raises DataError when either file is damaged, when they disagree, or when an id is outside the vocabulary.
    """
    index = index_path(path)
    dtype, lengths, offsets, borders = _tables(index)
    content = load(path)
    size = dtype.itemsize
    sequences = []
    for number, (length, offset) in enumerate(zip(lengths, offsets, strict=True)):
        if length < 0 or offset < 0 or offset % size or offset + length * size > len(content):
            rule = f"is {length} tokens at byte {offset}, outside the {len(content)} bytes of {path.name}"
            raise DataError(index, f"sequence {number}", rule, _LEGAL)
        sequences.append(_sequence(content, dtype, offset, length))
        _check_vocabulary(path, f"sequence {number}", sequences[-1], vocab)
    return [
        torch.cat(sequences[start:end]) if start < end else torch.empty(0, dtype=torch.int64, device="cpu")
        for start, end in zip(borders, borders[1:], strict=False)
    ]


def _sequence(content: bytes, dtype: torch.dtype, offset: int, length: int) -> Tensor:
    if not length:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    return torch.frombuffer(bytearray(content[offset : offset + length * dtype.itemsize]), dtype=dtype).to(torch.int64)


def _check_vocabulary(path: Path, place: str, tokens: Tensor, vocab: int) -> None:
    wrong = ((tokens < 0) | (tokens >= vocab)).nonzero()
    if len(wrong):
        at = int(wrong[0, 0])
        rule = f"token {at} is {int(tokens[at])}, outside the vocabulary"
        raise DataError(path, place, rule, f"0 to {vocab - 1}; or a larger vocab=")


def _tables(path: Path) -> tuple[torch.dtype, list[int], list[int], list[int]]:
    """Token type, lengths and byte offsets of the sequences, and document borders of an `.idx` file."""
    content = load(path)
    start = len(_MAGIC) + _HEAD.size
    if not content.startswith(_MAGIC) or len(content) < start:
        raise DataError(path, "header", "is not a Megatron index", _LEGAL)
    version, code, count, border_count = _HEAD.unpack(content[len(_MAGIC) : start])
    if version != 1 or code not in _TYPES:
        rule = f"has version {version} and token type {code}"
        raise DataError(path, "header", rule, "version 1, token type " + " ".join(map(str, _TYPES)))
    if not 0 < count <= MAX_DOCUMENTS or not 1 < border_count <= MAX_DOCUMENTS + 1:
        rule = f"announces {count} sequences and {border_count} document borders"
        raise DataError(path, "header", rule, f"1 to {MAX_DOCUMENTS} sequences, and a border more than documents")
    needed = start + 12 * count + 8 * border_count
    if len(content) not in (needed, needed + count):
        raise DataError(path, "", f"is cut or too long: {len(content)} bytes, {needed} announced", _LEGAL)
    numbers = struct.unpack_from(f"<{count}i{count}q{border_count}q", content, start)
    lengths, offsets, borders = numbers[:count], numbers[count : 2 * count], numbers[2 * count :]
    if borders[0] != 0 or borders[-1] != count or any(a > b for a, b in zip(borders, borders[1:], strict=False)):
        raise DataError(path, "document borders", f"do not run from 0 up to {count}", _LEGAL)
    return _TYPES[code], list(lengths), list(offsets), list(borders)
