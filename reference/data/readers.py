"""Text, JSON lines and token files of other systems to token ids.

A reader turns bytes into documents: int64 tensors [tokens of the document]. A token of text is a byte, and 256 ends a
document. With a vocabulary below 257 ids are taken modulo its size. With a larger one they are spread over the whole
range, so that plain text has tokens of every shard of the vocabulary. Token ids in a file stay as they are, and an id
outside the vocabulary is an error. In InternEvo's data a negative id marks a prompt: the token `abs(id)`, which the
model reads but never learns (EVO `data/tokenized/collaters.py`).

InternEvo's tokenized data: `x.bin`, JSON lines of tokens, one sentence a line, `{"tokens": [98655, 2317]}`. Beside it
`x.bin.meta`, a NumPy `.npy` array of rows (byte offset of the line, number of its tokens), int32 as InternEvo's tools
write it. Source: EVO `tools/tokenizer.py`, `data/tokenized/single_dataset.py`. InternEvo reads only the lines that
`.meta` names; here the two must agree line for line, so that a stale `.meta` cannot hide sentences. The `.npy` header
is parsed here, without NumPy.

Megatron-Core's indexed data: `x.bin`, the tokens of all sequences, and `x.idx`, where each of them starts. `.idx`,
little endian: the magic bytes, u64 version 1, u8 code of the token type, u64 number of sequences, u64 number of
document borders. Then i32 lengths, i64 byte offsets, i64 borders (document k has the sequences from border k up to
border k + 1). In multimodal data one i8 a sequence follows, which is not read. Source: MEG
`core/datasets/indexed_dataset.py`.
"""

import io
import json
import math
import re
import struct
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from shardproof.reference.data.files import DataError, load

END = 256
"""The token that ends a document of text."""
MAX_DOCUMENTS = 1_000_000

_LINE = '{"text": "..."} or {"tokens": [1, 2, 3]} on every line'


def encode(text: bytes, vocab: int) -> Tensor:
    """The document of this text, int64 [len(text) + 1], whose last token is END; see the module for the ids."""
    ids = torch.empty(len(text) + 1, dtype=torch.int64, device="cpu")
    if text:
        ids[:-1] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    ids[-1] = END
    return ids * _stride(vocab) % vocab


def _stride(vocab: int) -> int:
    """The factor of ids: 1 up to 257 tokens, else the first coprime of `vocab` from vocab/golden ratio on.

    It puts neighbouring bytes far apart, and never two bytes on one id.
    """
    if vocab <= END + 1:
        return 1
    return next(stride for stride in range(int(vocab * 0.618), vocab) if math.gcd(stride, vocab) == 1)


def plain_text(path: Path, vocab: int) -> list[Tensor]:
    """The document of a UTF-8 text file. Raises DataError if it is not UTF-8, or too large."""
    content = load(path)
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(path, f"byte {error.start}", f"is not UTF-8 ({error.reason})", "UTF-8 text") from None
    return [encode(content, vocab)]


def json_lines(path: Path, vocab: int) -> list[Tensor]:
    """Read a document from each line, `{"text": str}` or `{"tokens": [int]}`; blank lines are skipped. Raises DataError
    for others.
    """
    content = load(path)
    count = content.count(b"\n") + 1
    if count > MAX_DOCUMENTS:
        raise DataError(path, "", f"has {count} lines", f"at most {MAX_DOCUMENTS} lines")
    documents = []
    for number, line in enumerate(content.split(b"\n"), 1):
        if line.strip():
            documents.append(_document(path, f"line {number}", line, vocab))
    return documents


def tokens_of(path: Path, place: str, record: object, vocab: int) -> Tensor:
    """The document `record["tokens"]`: int64, ids between -(vocab - 1) and vocab - 1. Raises DataError for others."""
    tokens = record.get("tokens") if isinstance(record, dict) else None
    if not isinstance(tokens, list):
        raise DataError(path, place, "holds no list of tokens", '{"tokens": [1, 2, 3]}')
    for index, token in enumerate(tokens):
        if type(token) is not int:  # bool is an int in Python, but no token
            rule = f"token {index} is {json.dumps(token)[:40]}, not a whole number"
            raise DataError(path, place, rule, f"whole numbers below vocab={vocab}")
        if not -vocab < token < vocab:
            rule = f"token {index} is {_show_number(token)}, outside the vocabulary"
            raise DataError(path, place, rule, f"0 to {vocab - 1}, negative for a prompt; or a larger vocab=")
    return torch.tensor(tokens, dtype=torch.int64, device="cpu")


def record_of(path: Path, place: str, line: bytes) -> object:
    """The JSON value of one line. Raises DataError for invalid JSON."""
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(path, place, f"is not UTF-8 at byte {error.start} of the line", "UTF-8 text") from None
    except (ValueError, RecursionError) as error:  # also a number of 5000 digits, or 5000 nested brackets
        raise DataError(path, place, f"is not JSON ({str(error)[:80]})", _LINE) from None


def _document(path: Path, place: str, line: bytes, vocab: int) -> Tensor:
    record = record_of(path, place, line)
    if not isinstance(record, dict) or ("text" in record) == ("tokens" in record):
        raise DataError(path, place, "must hold either a text or tokens", _LINE)
    if "tokens" in record:
        return tokens_of(path, place, record, vocab)
    text = record["text"]
    if not isinstance(text, str):
        raise DataError(path, place, f"text is {json.dumps(text)[:40]}, not a string", _LINE)
    try:
        return encode(text.encode("utf-8"), vocab) if text else torch.empty(0, dtype=torch.int64, device="cpu")
    except UnicodeEncodeError as error:
        rule = f"text holds half a surrogate pair at character {error.start}"
        raise DataError(path, place, rule, "Unicode text") from None


def _show_number(number: int) -> str:
    """The number, or its size if it is too long for a message."""
    return str(number) if abs(number) < 10**20 else f"a number of {number.bit_length()} bits"


_NUMPY = b"\x93NUMPY"
_NUMPY_HEADER = re.compile(
    rb"\{'descr': '<i([48])', 'fortran_order': (True|False), 'shape': \(([0-9]{1,18}), ([0-9]{1,18})\), \}\s*"
)
_LEGAL_META = "the .meta that InternEvo's tokenizer wrote with this .bin: rows (byte offset, token count)"
_MAGIC = b"MMIDIDX\x00\x00"
_HEAD = struct.Struct("<QBQQ")
_TYPES = {1: torch.uint8, 3: torch.int16, 4: torch.int32, 5: torch.int64, 8: torch.uint16}
_LEGAL_INDEX = "the .idx that Megatron's builder wrote with this .bin"


def read_internevo(path: Path, vocab: int) -> list[Tensor]:
    """The sentences of `path` (`x.bin`), checked against `x.bin.meta`: int64, one tensor a line.

    Raises DataError if either file is damaged, if they disagree, or if an id is outside the vocabulary.
    """
    meta = path.with_name(path.name + ".meta")
    rows = _meta_rows(meta)
    lines = io.BytesIO(load(path)).readlines()
    if len(lines) != len(rows):
        raise DataError(meta, "", f"has {len(rows)} rows for {len(lines)} lines of {path.name}", _LEGAL_META)
    documents, start = [], 0
    for number, ((offset, count), line) in enumerate(zip(rows, lines, strict=True)):
        if offset != start:
            rule = f"says byte {offset}, but line {number + 1} of {path.name} starts at byte {start}"
            raise DataError(meta, f"row {number}", rule, _LEGAL_META)
        place = f"line {number + 1}"
        tokens = tokens_of(path, place, record_of(path, place, line), vocab)
        if len(tokens) != count:
            rule = f"says {count} tokens, but line {number + 1} of {path.name} holds {len(tokens)}"
            raise DataError(meta, f"row {number}", rule, _LEGAL_META)
        documents.append(tokens)
        start += len(line)
    return documents


def _meta_rows(path: Path) -> list[tuple[int, int]]:
    """The (offset, count) rows of a `.meta` file."""
    content = load(path)
    layout = "<I" if content[6:7] in (b"\x02", b"\x03") else "<H"
    start = len(_NUMPY) + 2 + struct.calcsize(layout)
    if not content.startswith(_NUMPY) or len(content) < start:
        raise DataError(path, "header", "is not a NumPy array", _LEGAL_META)
    end = start + int(struct.unpack(layout, content[start - struct.calcsize(layout) : start])[0])
    head = _NUMPY_HEADER.fullmatch(content[start:end])
    if head is None:
        raise DataError(path, "header", "does not describe rows of two whole numbers", f"{_LEGAL_META}, int32 or int64")
    size_bytes, count, width = int(head[1]), int(head[3]), int(head[4])
    if width != 2 or not 0 < count <= MAX_DOCUMENTS:
        raise DataError(path, "header", f"has the shape {count, width}", f"(n, 2) with n from 1 to {MAX_DOCUMENTS}")
    needed, found = count * width * size_bytes, len(content) - end
    if found != needed:
        raise DataError(path, "", f"is cut or too long: {found} bytes of numbers, {needed} announced", _LEGAL_META)
    numbers = struct.unpack(f"<{count * width}{'i' if size_bytes == 4 else 'q'}", content[end:])
    offsets, counts = (numbers[:count], numbers[count:]) if head[2] == b"True" else (numbers[::2], numbers[1::2])
    rows = list(zip(offsets, counts, strict=True))
    for number, row in enumerate(rows):
        if min(row) < 0:
            raise DataError(path, f"row {number}", f"is {row}, a negative size", _LEGAL_META)
    return rows


def read_megatron(path: Path, vocab: int) -> list[Tensor]:
    """The documents of `path` (`x.bin`) as `x.idx` cuts them: int64, every id from 0 to vocab - 1.

    Raises DataError if either file is damaged, if they disagree, or if an id is outside the vocabulary.
    """
    index = path.with_suffix(".idx")
    dtype, lengths, offsets, borders = _index_tables(index)
    content, nothing = load(path), torch.empty(0, dtype=torch.int64, device="cpu")
    size = dtype.itemsize
    sequences = []
    for number, (length, offset) in enumerate(zip(lengths, offsets, strict=True)):
        if length < 0 or offset < 0 or offset % size or offset + length * size > len(content):
            rule = f"is {length} tokens at byte {offset}, outside the {len(content)} bytes of {path.name}"
            raise DataError(index, f"sequence {number}", rule, _LEGAL_INDEX)
        own = bytearray(content[offset : offset + length * size])
        tokens = torch.frombuffer(own, dtype=dtype).to(torch.int64) if own else nothing
        wrong = ((tokens < 0) | (tokens >= vocab)).nonzero().flatten().tolist()
        if wrong:
            rule = f"token {wrong[0]} is {int(tokens[wrong[0]])}, outside the vocabulary"
            raise DataError(path, f"sequence {number}", rule, f"0 to {vocab - 1}; or a larger vocab=")
        sequences.append(tokens)
    return [torch.cat([nothing, *sequences[start:end]]) for start, end in pairwise(borders)]


def _index_tables(path: Path) -> tuple[torch.dtype, list[int], list[int], list[int]]:
    """Token type, lengths and byte offsets of the sequences, and document borders of an `.idx` file."""
    content = load(path)
    start = len(_MAGIC) + _HEAD.size
    if not content.startswith(_MAGIC) or len(content) < start:
        raise DataError(path, "header", "is not a Megatron index", _LEGAL_INDEX)
    version, code, count, border_count = _HEAD.unpack(content[len(_MAGIC) : start])
    if version != 1 or code not in _TYPES:
        rule = f"has version {version} and token type {code}"
        raise DataError(path, "header", rule, "version 1, token type " + " ".join(map(str, _TYPES)))
    if not 0 < count <= MAX_DOCUMENTS or not 1 < border_count <= MAX_DOCUMENTS + 1:
        rule = f"announces {count} sequences and {border_count} document borders"
        raise DataError(path, "header", rule, f"1 to {MAX_DOCUMENTS} sequences, and a border more than documents")
    needed = start + 12 * count + 8 * border_count
    if len(content) not in (needed, needed + count):
        raise DataError(path, "", f"is cut or too long: {len(content)} bytes, {needed} announced", _LEGAL_INDEX)
    numbers = struct.unpack_from(f"<{count}i{count}q{border_count}q", content, start)
    lengths, offsets, borders = numbers[:count], numbers[count : 2 * count], numbers[2 * count :]
    if borders[0] != 0 or borders[-1] != count or any(a > b for a, b in pairwise(borders)):
        raise DataError(path, "document borders", f"do not run from 0 up to {count}", _LEGAL_INDEX)
    return _TYPES[code], list(lengths), list(offsets), list(borders)
