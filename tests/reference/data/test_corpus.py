"""Files to tokens: every format read back, Megatron's .bin/.idx too; test_hostile_data.py has the refused ones."""

import io
import json
import sysconfig
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

from shardproof.reference.case import Case
from shardproof.reference.data import corpus
from shardproof.reference.data.readers import END, read_megatron
from tests.reference.data.batch_forms import index, write_internevo, write_megatron


def documents(case: Case) -> list[torch.Tensor]:
    found = corpus.read(corpus.sources(case), case.vocab)
    return list(found.ids.split(found.lengths))


def tokens(path: Path, vocab: int = END + 1) -> list[list[int]]:
    """Documents of a path; the vocabulary has one id a byte and END, unless said."""
    found = documents(Case.of(data=str(path), vocab=vocab))
    assert {document.dtype for document in found} == {torch.int64}
    return [document.tolist() for document in found]


LINES = '{"text": "ab", "source": "x"}\n\n{"tokens": [3, 0, -256]}\r\n{"text": ""}\n{"tokens": []}'


@pytest.mark.parametrize(
    ("name", "text", "vocab", "right"),
    [
        ("a.txt", "h\u00e9\r\n", END + 1, [[104, 0xC3, 0xA9, 13, 10, END]]),
        ("a.txt", "az", 100, [[97, 22, 56]]),
        ("a.txt", "az", 256, [[97, 122, 0]]),
        ("a.jsonl", LINES, END + 1, [[97, 98, END], [3, 0, -256]]),
    ],
    ids=["bytes and an end", "a small vocabulary folds bytes", "by modulo", "lines of json"],
)
def test_a_text_is_its_bytes_and_lines_hold_texts_or_tokens(
    tmp_path: Path, name: str, text: str, vocab: int, right: list[list[int]]
) -> None:
    (tmp_path / name).write_bytes(text.encode())
    assert tokens(tmp_path / name, vocab) == right


def test_a_large_vocabulary_is_met_everywhere_by_plain_text(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("".join(map(chr, range(128))))
    (found,) = tokens(file, vocab=509)
    assert found[:3] == [0, 314, 119]  # 314 is the first number from 0.618 * 509 on that shares no factor with it
    assert len(set(found)) == 129
    assert {token * 4 // 512 for token in found} == {0, 1, 2, 3}


def test_a_folder_is_read_in_sorted_order_without_what_is_no_data(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    read = {"b/a.py": "3", "c.txt": "4", "a.md": "1", "a.jsonl": '{"text": "0"}', "e.py": ""}
    for name, text in (read | dict.fromkeys((".git/x.txt", "image.png", ".hidden.txt"), "9")).items():
        (tmp_path / name).write_text(text)
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


def test_a_pair_is_read_as_its_format_says(tmp_path: Path) -> None:
    path = write_megatron(tmp_path / "x.bin", index())
    assert tokens(path) == [[1, 2], [3]]
    modes = bytes(2)
    write_megatron(path, index(borders=(0, 0, 2), tail=modes))
    assert [document.tolist() for document in read_megatron(path, 257)] == [[], [1, 2, 3]]


@pytest.mark.peers
@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64])
def test_what_megatrons_builder_writes_is_read_back(tmp_path: Path, dtype: type) -> None:
    indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset", reason="needs the extra `peers`")
    builder = indexed.IndexedDatasetBuilder(str(tmp_path / "x.bin"), dtype=dtype)
    for document in ([[5, 6, 7], [8]], [[50256]], [[1, 2], [], [3]]):  # of sequences of tokens
        lengths = [len(sequence) for sequence in document]
        builder.add_document(np.array([token for sequence in document for token in sequence]), lengths)
    builder.finalize(str(tmp_path / "x.idx"))
    read = read_megatron(tmp_path / "x.bin", 50257)
    assert [document.tolist() for document in read] == [[5, 6, 7, 8], [50256], [1, 2, 3]]
