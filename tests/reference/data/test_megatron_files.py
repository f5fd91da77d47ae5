"""Megatron's `.bin/.idx`: what its own builder writes is read back, and damaged files are refused."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from reference.case import Case
from reference.data.corpus import documents
from reference.data.files import DataError
from reference.data.megatron_files import read_megatron

DOCUMENTS = [[[5, 6, 7], [8]], [[50256]], [[1, 2], [], [3]]]
"""Documents of sequences of tokens."""


def index(
    *,
    magic: bytes = b"MMIDIDX\x00\x00",
    version: int = 1,
    code: int = 4,
    lengths: tuple[int, ...] = (2, 1),
    offsets: tuple[int, ...] = (0, 8),
    borders: tuple[int, ...] = (0, 1, 2),
    counts: tuple[int, int] | None = None,
    tail: bytes = b"",
) -> bytes:
    """An `.idx` file, field by field as its format is published; sound unless a field is replaced."""
    sizes = counts or (len(lengths), len(borders))
    tables = f"<{len(lengths)}i{len(offsets)}q{len(borders)}q"
    return (
        magic + struct.pack("<QBQQ", version, code, *sizes) + struct.pack(tables, *lengths, *offsets, *borders) + tail
    )


def write(folder: Path, idx: bytes, tokens: tuple[int, ...] = (1, 2, 3)) -> Path:
    (folder / "x.idx").write_bytes(idx)
    (folder / "x.bin").write_bytes(struct.pack(f"<{len(tokens)}i", *tokens))
    return folder / "x.bin"


def test_a_pair_is_read_as_its_format_says(tmp_path: Path) -> None:
    path = write(tmp_path, index())
    assert [document.tolist() for document in documents(Case.of(data=str(path), vocab=257))] == [[1, 2], [3]]
    modes = bytes(2)
    path = write(tmp_path, index(borders=(0, 0, 2), tail=modes))
    assert [document.tolist() for document in read_megatron(path, 257)] == [[], [1, 2, 3]]


@pytest.mark.peers
@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64])
def test_what_megatrons_builder_writes_is_read_back(tmp_path: Path, dtype: type) -> None:
    indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset", reason="the extra peers is not installed")
    builder = indexed.IndexedDatasetBuilder(str(tmp_path / "x.bin"), dtype=dtype)
    for document in DOCUMENTS:
        lengths = [len(sequence) for sequence in document]
        builder.add_document(np.array([token for sequence in document for token in sequence]), lengths)
    builder.finalize(str(tmp_path / "x.idx"))
    read = read_megatron(tmp_path / "x.bin", 50257)
    assert [document.tolist() for document in read] == [[5, 6, 7, 8], [50256], [1, 2, 3]]


DAMAGED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "x.idx: is empty"),
    "junk": (b"\xff" * 99, "x.idx, header: is not a Megatron index"),
    "cut in its header": (index()[:20], "x.idx, header: is not a Megatron index"),
    "version": (index(version=2), "has version 2 and token type 4; legal: version 1"),
    "tokens of floats": (index(code=7), "has version 1 and token type 7; legal: version 1, token type 1 3 4 5 8"),
    "endless sequences": (index(counts=(2**60, 3)), "announces 1152921504606846976 sequences"),
    "endless documents": (index(counts=(2, 2**60)), "and 1152921504606846976 document borders"),
    "cut in its tables": (index()[:-1], r"x.idx: is cut or too long: \d+ bytes"),
    "too long": (index(tail=b"123"), "is cut or too long"),
    "negative length": (index(lengths=(-2, 1)), "sequence 0: is -2 tokens at byte 0, outside the 12 bytes of x.bin"),
    "negative offset": (index(offsets=(0, -4)), "sequence 1: is 1 tokens at byte -4, outside"),
    "offset inside a token": (index(offsets=(0, 7)), "sequence 1: is 1 tokens at byte 7, outside"),
    "truncated bin": (index(lengths=(2, 2)), "sequence 1: is 2 tokens at byte 8, outside the 12 bytes of x.bin"),
    "borders that fall": (
        index(lengths=(1, 1, 1), offsets=(0, 4, 8), borders=(0, 2, 1, 3)),
        "do not run from 0 up to 3",
    ),
    "borders that end early": (index(borders=(0, 1, 1)), "do not run from 0 up to 2"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_index_is_refused(tmp_path: Path, name: str) -> None:
    content, message = DAMAGED[name]
    path = write(tmp_path, content)
    with pytest.raises(DataError, match=message) as caught:
        documents(Case.of(data=str(path), vocab=257))
    assert caught.value.path.startswith(str(tmp_path))
    assert "; legal: " in str(caught.value)


@pytest.mark.parametrize("token", [-1, 257])
def test_a_token_outside_the_vocabulary_is_named(tmp_path: Path, token: int) -> None:
    path = write(tmp_path, index(), tokens=(1, token, 3))
    with pytest.raises(
        DataError, match=rf"x\.bin, sequence 0: token 1 is {token}, outside the vocabulary; legal: 0 to 256"
    ):
        documents(Case.of(data=str(path), vocab=257))
