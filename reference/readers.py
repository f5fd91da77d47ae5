"""Text and JSON lines to token ids, and the one error of all readers.

A reader turns bytes into documents: int64 tensors [tokens of the document]. Text is byte-level: a token is the byte,
256 ends a document; a vocabulary below 257 folds ids by modulo, a larger one spreads them over its whole range, so that
plain text meets every shard of the vocabulary. Token ids that a file already holds stay as they are: an id outside the
vocabulary is an error. A negative id is InternEvo's mark of a prompt: the token `abs(id)`, which the model reads but
never learns (EVO `data/tokenized/collaters.py`).
"""

from __future__ import annotations

import json
import math
import os
import stat
from pathlib import Path

import torch
from torch import Tensor

__all__ = [
    "END",
    "MAX_DOCUMENTS",
    "MAX_FILE_BYTES",
    "DataError",
    "encode",
    "json_lines",
    "load",
    "plain_text",
    "record_of",
    "status",
    "tokens_of",
]

END = 256
"""The token that ends a document of text."""
MAX_FILE_BYTES = 32 * 2**20
MAX_DOCUMENTS = 1_000_000

_LINE = '{"text": "..."} or {"tokens": [1, 2, 3]} on every line'


class DataError(ValueError):
    """Data that cannot be read: names the file, the place in it, the rule that it breaks and what is legal."""

    def __init__(self, path: str | Path, place: str, rule: str, legal: str) -> None:
        where = f"{path}, {place}" if place else str(path)
        super().__init__(f"{where}: {rule}; legal: {legal}")
        self.path, self.place, self.rule, self.legal = str(path), place, rule, legal


def status(path: Path) -> os.stat_result:
    """The status of a file or folder that must exist; DataError when it does not."""
    try:
        return path.stat()
    except (OSError, ValueError) as error:  # ValueError: a path with a null byte
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise DataError(path, "", f"cannot be opened ({reason})", "a readable file or folder") from None


def load(path: Path) -> bytes:
    """All bytes of a regular file that holds between 1 and MAX_FILE_BYTES bytes; DataError otherwise."""
    found = status(path)
    if not stat.S_ISREG(found.st_mode):
        raise DataError(path, "", "is not a regular file", "a text, .jsonl or .bin file, or a folder of them")
    if found.st_size > MAX_FILE_BYTES:
        rule = f"holds {found.st_size} bytes, more than are read into memory"
        raise DataError(path, "", rule, f"at most {MAX_FILE_BYTES} bytes: name a part of the data")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(path, "", f"cannot be read ({error.strerror})", "a readable file") from None
    if not content:
        raise DataError(path, "", "is empty", "a file with at least one token")
    return content


def encode(text: bytes, vocab: int) -> Tensor:
    """The byte-level document of this text: int64 [len(text) + 1], the last token is END; see the module for ids."""
    ids = torch.empty(len(text) + 1, dtype=torch.int64, device="cpu")
    if text:
        ids[:-1] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    ids[-1] = END
    return ids * _stride(vocab) % vocab


def _stride(vocab: int) -> int:
    """What ids are multiplied by: 1 up to 257 tokens, else the first number from vocab/golden ratio on without a
    common factor, which puts neighbouring bytes far apart and never two bytes on one id."""
    if vocab <= END + 1:
        return 1
    return next(stride for stride in range(int(vocab * 0.618), vocab) if math.gcd(stride, vocab) == 1)


def plain_text(path: Path, vocab: int) -> list[Tensor]:
    """The one document of a UTF-8 text file. Raises DataError when it is not UTF-8, or too large."""
    content = load(path)
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(path, f"byte {error.start}", f"is not UTF-8 ({error.reason})", "UTF-8 text") from None
    return [encode(content, vocab)]


def json_lines(path: Path, vocab: int) -> list[Tensor]:
    """One document a line, `{"text": str}` or `{"tokens": [int]}`; blank lines hold none.

    Raises DataError for too many lines, or a line that holds neither.
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
    """The document `record["tokens"]`: int64, every id between -(vocab - 1) and vocab - 1.

    Raises DataError for anything else.
    """
    tokens = record.get("tokens") if isinstance(record, dict) else None
    if not isinstance(tokens, list):
        raise DataError(path, place, "holds no list of tokens", '{"tokens": [1, 2, 3]}')
    for index, token in enumerate(tokens):
        if type(token) is not int:  # bool is an int in Python, but no token
            rule = f"token {index} is {json.dumps(token)[:40]}, not a whole number"
            raise DataError(path, place, rule, f"whole numbers below vocab={vocab}")
        if not -vocab < token < vocab:
            rule = f"token {index} is {_shown(token)}, outside the vocabulary"
            raise DataError(path, place, rule, f"0 to {vocab - 1}, negative for a prompt; or a larger vocab=")
    return torch.tensor(tokens, dtype=torch.int64, device="cpu")


def record_of(path: Path, place: str, line: bytes) -> object:
    """The JSON value of one line; DataError when it is none."""
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(path, place, f"is not UTF-8 at byte {error.start} of the line", "UTF-8 text") from None
    except (ValueError, RecursionError) as error:  # also a number of 5000 digits, a nesting of 5000 brackets
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


def _shown(number: int) -> str:
    """The number, or its size when it is too long for a message."""
    return str(number) if abs(number) < 10**20 else f"a number of {number.bit_length()} bits"
