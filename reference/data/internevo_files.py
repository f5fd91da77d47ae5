"""InternEvo's tokenized data: `x.bin`, JSON lines of tokens, and `x.bin.meta`, where each line starts.

`.bin`: one sentence a line, `{"tokens": [98655, 2317]}`. `.meta`: a NumPy `.npy` array of rows (byte offset of the
line, number of its tokens), int32 as InternEvo's tools write it. Source: EVO `tools/tokenizer.py`,
`data/tokenized/single_dataset.py`. InternEvo reads only the lines that `.meta` names; here the two must agree line for
line, so that a stale `.meta` cannot hide sentences. The `.npy` header is parsed here because this room needs nothing
but torch.
"""

import io
import re
import struct
from pathlib import Path

from torch import Tensor

from reference.data.files import DataError, load
from reference.data.readers import MAX_DOCUMENTS, record_of, tokens_of

_MAGIC = b"\x93NUMPY"
_HEADER = re.compile(
    rb"\{'descr': '<i([48])', 'fortran_order': (True|False), 'shape': \(([0-9]{1,18}), ([0-9]{1,18})\), \}\s*"
)
_LEGAL = "the .meta that InternEvo's tokenizer wrote with this .bin: rows (byte offset, token count)"


def meta_path(path: Path) -> Path:
    """Where the rows of `x.bin` stand: `x.bin.meta`."""
    return path.with_name(path.name + ".meta")


def read_internevo(path: Path, vocab: int) -> list[Tensor]:
    """The sentences of `path` (`x.bin`), checked against `x.bin.meta`: int64, one tensor a line.

    Raises DataError when either file is damaged, when they disagree, or when an id is outside the vocabulary.
    """
    rows = _rows(meta_path(path))
    lines = io.BytesIO(load(path)).readlines()
    if len(lines) != len(rows):
        raise DataError(meta_path(path), "", f"has {len(rows)} rows for {len(lines)} lines of {path.name}", _LEGAL)
    documents, start = [], 0
    for number, ((offset, count), line) in enumerate(zip(rows, lines, strict=True)):
        if offset != start:
            rule = f"says byte {offset}, but line {number + 1} of {path.name} starts at byte {start}"
            raise DataError(meta_path(path), f"row {number}", rule, _LEGAL)
        place = f"line {number + 1}"
        tokens = tokens_of(path, place, record_of(path, place, line), vocab)
        if len(tokens) != count:
            rule = f"says {count} tokens, but line {number + 1} of {path.name} holds {len(tokens)}"
            raise DataError(meta_path(path), f"row {number}", rule, _LEGAL)
        documents.append(tokens)
        start += len(line)
    return documents


def _rows(path: Path) -> list[tuple[int, int]]:
    """The (offset, count) rows of a `.meta` file."""
    content = load(path)
    layout = "<I" if content[6:7] in (b"\x02", b"\x03") else "<H"
    start = len(_MAGIC) + 2 + struct.calcsize(layout)
    if not content.startswith(_MAGIC) or len(content) < start:
        raise DataError(path, "header", "is not a NumPy array", _LEGAL)
    end = start + int(struct.unpack(layout, content[start - struct.calcsize(layout) : start])[0])
    head = _HEADER.fullmatch(content[start:end])
    if head is None:
        raise DataError(path, "header", "does not describe rows of two whole numbers", f"{_LEGAL}, int32 or int64")
    size_bytes, count, width = int(head[1]), int(head[3]), int(head[4])
    if width != 2 or not 0 < count <= MAX_DOCUMENTS:
        raise DataError(path, "header", f"has the shape {count, width}", f"(n, 2) with n from 1 to {MAX_DOCUMENTS}")
    needed, found = count * width * size_bytes, len(content) - end
    if found != needed:
        raise DataError(path, "", f"is cut or too long: {found} bytes of numbers, {needed} announced", _LEGAL)
    numbers = struct.unpack(f"<{count * width}{'i' if size_bytes == 4 else 'q'}", content[end:])
    by_column = head[2] == b"True"
    rows = list(
        zip(numbers[:count], numbers[count:], strict=True)
        if by_column
        else zip(numbers[::2], numbers[1::2], strict=True)
    )
    for number, row in enumerate(rows):
        if min(row) < 0:
            raise DataError(path, f"row {number}", f"is {row}, a negative size", _LEGAL)
    return rows
