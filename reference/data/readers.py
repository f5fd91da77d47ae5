"""Text and JSON lines to token ids.

A reader turns bytes into documents: int64 tensors [tokens of the document]. Text is byte-level: a token is the byte,
256 ends a document. A vocabulary below 257 folds ids by modulo. A larger one spreads them over its whole range, so that
plain text meets every shard of the vocabulary. Token ids that a file already holds stay as they are: an id outside the
vocabulary is an error. A negative id is InternEvo's mark of a prompt: the token `abs(id)`, which the model reads but
never learns (EVO `data/tokenized/collaters.py`).
"""

import json
import math
from pathlib import Path

import torch
from torch import Tensor

from shardproof.reference.data.files import DataError, load

END = 256
"""The token that ends a document of text."""
MAX_DOCUMENTS = 1_000_000

_LINE = '{"text": "..."} or {"tokens": [1, 2, 3]} on every line'


def encode(text: bytes, vocab: int) -> Tensor:
    """The byte-level document of this text: int64 [len(text) + 1], the last token is END; see the module for ids."""
    ids = torch.empty(len(text) + 1, dtype=torch.int64, device="cpu")
    if text:
        ids[:-1] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    ids[-1] = END
    return ids * _stride(vocab) % vocab


def _stride(vocab: int) -> int:
    """Factor of ids: 1 up to 257 tokens, else the first number from vocab/golden ratio on without a common factor.

    The factor puts neighbouring bytes far apart and never two bytes on one id.
    """
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
    """Read a document a line, `{"text": str}` or `{"tokens": [int]}`, blank lines none. Raises DataError for others."""
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
            rule = f"token {index} is {_shown(token)}, outside the vocabulary"
            raise DataError(path, place, rule, f"0 to {vocab - 1}, negative for a prompt; or a larger vocab=")
    return torch.tensor(tokens, dtype=torch.int64, device="cpu")


def record_of(path: Path, place: str, line: bytes) -> object:
    """The JSON value of one line. Raises DataError when it is none."""
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
