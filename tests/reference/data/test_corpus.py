"""Files to tokens: every format read back, Megatron's .bin/.idx too; test_hostile_data.py has the refused ones."""

import io
import json
import struct
import sysconfig
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

from reference.case import Case
from reference.data import corpus
from reference.data.files import DataError
from reference.data.readers import END
from reference.data.token_files import read_megatron
from tests.reference.data.batch_forms import write_internevo


def case(path: Path, *, vocab: int = END + 1, **words: int) -> Case:
    """A case that reads this path; its vocabulary has one id a byte and END, unless said."""
    return Case.of(data=str(path), vocab=vocab, **words)


def documents(case: Case) -> list[torch.Tensor]:
    found = corpus.read(corpus.sources(case), case.vocab)
    return list(found.ids.split(found.lengths))


def tokens(path: Path, **words: int) -> list[list[int]]:
    return [document.tolist() for document in documents(case(path, **words))]


def test_a_text_is_its_bytes_and_an_end(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes("h\u00e9\r\n".encode())
    assert tokens(file) == [[104, 0xC3, 0xA9, 13, 10, END]]
    assert documents(case(file))[0].dtype == torch.int64


def test_a_small_vocabulary_folds_bytes_by_modulo(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("az")
    assert tokens(file, vocab=100) == [[97, 22, 56]]
    assert tokens(file, vocab=256) == [[97, 122, 0]]


def test_a_large_vocabulary_is_met_everywhere_by_plain_text(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("".join(map(chr, range(128))))
    (found,) = tokens(file, vocab=509)
    assert found[:3] == [0, 314, 119]  # 314 is the first number from 0.618 * 509 on that shares no factor with it
    assert len(set(found)) == 129
    assert {token * 4 // 512 for token in found} == {0, 1, 2, 3}


def test_json_lines_hold_texts_and_tokens(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "ab", "source": "x"}\n\n{"tokens": [3, 0, -256]}\r\n{"text": ""}\n{"tokens": []}')
    assert tokens(file) == [[97, 98, END], [3, 0, -256]]


def test_a_folder_is_read_in_sorted_order_without_what_is_no_data(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    for name, text in {
        "b/a.py": "3",
        "c.txt": "4",
        "a.md": "1",
        ".git/x.txt": "9",
        "image.png": "9",
        "e.py": "",
    }.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "a.jsonl").write_text('{"text": "0"}')
    (tmp_path / ".hidden.txt").write_text("9")
    write_internevo(tmp_path / "b" / "b.bin", [torch.tensor([50]), torch.tensor([51, 52])])
    assert tokens(tmp_path) == [[48, END], [49, END], [52, END], [51, END], [50], [51, 52]]


def test_without_a_path_the_standard_library_is_read() -> None:
    first = documents(Case.of(vocab=END + 1))
    path = Path(corpus.sources(Case())[0].path)
    assert path.parent == Path(sysconfig.get_path("stdlib"))
    assert bytes(first[0][:-1].tolist()) == path.read_bytes()
    assert corpus.STANDARD_LIBRARY_BYTES <= sum(map(len, first)) <= 2 * corpus.STANDARD_LIBRARY_BYTES


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("a")
    assert tokens(file) == [[97, END]]
    file.write_text("bc")
    assert tokens(file) == [[98, 99, END]]


def test_internevo_files_are_those_of_its_own_tools(tmp_path: Path) -> None:
    """The three sentences and the rows that the README of InternEvo's tools prints."""
    rows = [
        [98655, 2317, 2922, 6649, 1595, 7856, 435, 2424, 442, 9556, 12807, 410, 17313, 446, 23331, 95746],
        [98655, 302, 1383, 269, 657, 410, 2687, 446, 2424, 98667, 269, 25220]
        + [281, 523, 1874, 492, 1248, 38127, 4563, 442, 11227, 829, 8980, 95746],
        [98655, 24190, 442, 517, 15013, 649, 454, 8793, 442, 5849, 9556, 17917, 1369, 1084, 29890, 12021, 95746],
    ]
    path = tmp_path / "x.bin"
    write_internevo(path, [torch.tensor(row) for row in rows])
    assert json.loads(path.read_text().splitlines()[2]) == {"tokens": rows[2]}
    assert np.load(io.BytesIO((tmp_path / "x.bin.meta").read_bytes())).tolist() == [[0, 16], [110, 24], [262, 17]]
    assert tokens(path, vocab=103168) == rows


@pytest.mark.parametrize(("dtype", "order"), [(np.int32, "F"), (np.int64, "C")])
def test_meta_rows_are_read_in_every_plain_form(tmp_path: Path, dtype: type, order: Literal["C", "F"]) -> None:
    path = tmp_path / "x.bin"
    write_internevo(path, [torch.tensor([1, 2]), torch.tensor([3]), torch.tensor([4])])
    np.save(tmp_path / "x.npy", np.array([(0, 2), (19, 1), (35, 1)], dtype=dtype, order=order))
    (tmp_path / "x.npy").rename(tmp_path / "x.bin.meta")
    assert tokens(path) == [[1, 2], [3], [4]]


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


def written(folder: Path, idx: bytes, tokens: tuple[int, ...] = (1, 2, 3)) -> Path:
    (folder / "x.idx").write_bytes(idx)
    (folder / "x.bin").write_bytes(struct.pack(f"<{len(tokens)}i", *tokens))
    return folder / "x.bin"


def test_a_pair_is_read_as_its_format_says(tmp_path: Path) -> None:
    path = written(tmp_path, index())
    assert [document.tolist() for document in documents(Case.of(data=str(path), vocab=257))] == [[1, 2], [3]]
    modes = bytes(2)
    path = written(tmp_path, index(borders=(0, 0, 2), tail=modes))
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
    path = written(tmp_path, content)
    with pytest.raises(DataError, match=message) as caught:
        documents(Case.of(data=str(path), vocab=257))
    assert caught.value.path.startswith(str(tmp_path))
    assert "; legal: " in str(caught.value)


@pytest.mark.parametrize("token", [-1, 257])
def test_a_token_outside_the_vocabulary_is_named(tmp_path: Path, token: int) -> None:
    path = written(tmp_path, index(), tokens=(1, token, 3))
    with pytest.raises(
        DataError, match=rf"x\.bin, sequence 0: token 1 is {token}, outside the vocabulary; legal: 0 to 256"
    ):
        documents(Case.of(data=str(path), vocab=257))
