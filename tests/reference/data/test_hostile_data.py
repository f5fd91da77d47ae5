"""Tests of data/readers. Files that cannot be data: each gives one DataError that names file, place, rule and what
is legal.
"""

import io
import os
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardproof.reference.data import corpus, files, readers
from shardproof.reference.data.files import DataError
from tests.reference.data.batch_forms import index, write_internevo, write_megatron


def read(path: Path, vocab: int = 257) -> corpus.Tokens:
    """The corpus at any path, those included that a case cannot spell, and without what was read before."""
    return corpus.read.__wrapped__(corpus._sources_at(path), vocab)


def check_refused(path: Path, message: str) -> None:
    """Read and expect one DataError with this message, a path and a legal value, and no other error behind it."""
    with pytest.raises(DataError, match=message) as caught:
        read(path)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    assert str(caught.value).startswith(str(path.parent))
    assert "; legal: " in str(caught.value)


PATHS = {
    "missing": ("nowhere.txt", r"nowhere.txt: cannot be opened \(No such file"),
    "null byte": ("a\0.txt", r"cannot be opened \(embedded null"),
    "too long a name": ("a" * 300, r"cannot be opened \(File name too long"),
    "below a file": ("file.txt/b.txt", r"cannot be opened \(Not a directory"),
    "folder without data": ("folder", "is a folder without data; legal: at least one file that ends in .jsonl .bin"),
    "pipe": ("pipe.txt", "is not a regular file"),
    "pipe in a folder": ("pipes", "p.txt: is not a regular file"),
    "dangling link": ("links", "l.txt: cannot be opened"),
    "folder in the place of a meta": ("dir.bin", r"dir.bin.meta: is not a regular file"),
    "bin alone": ("alone.bin", "stands beside no index; legal: either alone.bin.meta .InternEvo. or alone.idx"),
    "meta": ("two.bin.meta", "says only where sentences start; legal: the .bin file beside it"),
    "bin with two indexes": ("two.bin", r"stands beside two.bin.meta and two.idx; legal: either"),
}


@pytest.mark.parametrize("name", PATHS)
def test_a_path_that_is_no_data_is_refused(tmp_path: Path, name: str) -> None:
    for folder in ("folder", "pipes", "links", "dir.bin.meta"):
        (tmp_path / folder).mkdir()
    for file in ("file.txt", "dir.bin", "alone.bin", "two.bin", "two.bin.meta", "two.idx"):
        (tmp_path / file).write_text("x")
    os.mkfifo(tmp_path / "pipe.txt")
    os.mkfifo(tmp_path / "pipes" / "p.txt")
    (tmp_path / "links" / "l.txt").symlink_to(tmp_path / "gone.txt")
    path, message = PATHS[name]
    check_refused(tmp_path / path, message)


def saved(rows: object, dtype: str = "<i4") -> bytes:
    """The `.npy` file of an array."""
    file = io.BytesIO()
    np.save(file, np.array(rows, dtype=dtype))
    return file.getvalue()


def header(shape: str) -> bytes:
    """The start of an `.npy` file that announces int32 numbers of this shape."""
    head = f"{{'descr': '<i4', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head


DAMAGED: dict[str, dict[str, tuple[bytes, str]]] = {
    "a.txt": {
        "empty text": (b"", "a.txt: is empty; legal: a file with at least one token"),
        "not UTF-8": (b"ab\xff\xfe", "a.txt, byte 2: is not UTF-8"),
    },
    "a.jsonl": {
        "empty documents": (b'{"tokens": []}\n{"text": ""}', "hold no token"),
        "junk": (b"\x00\x01\x9f\xff\n", "line 1: is not UTF-8"),
        "cut": (b'{"text": "a"}\n{"tex', "line 2: is not JSON"),
        "no object": (b"[1, 2]", "line 1: must hold either a text or tokens"),
        "neither key": (b'{"txt": "a"}', "must hold either a text or tokens"),
        "both keys": (b'{"text": "a", "tokens": [1]}', "must hold either a text or tokens"),
        "text a number": (b'{"text": 5}', "text is 5, not a string"),
        "half a character": (b'{"text": "\\ud800"}', "half a surrogate pair at character 0"),
        "tokens a string": (b'{"tokens": "12"}', "holds no list of tokens"),
        "token a float": (b'{"tokens": [1, 2.0]}', "token 1 is 2.0, not a whole number"),
        "token a bool": (b'{"tokens": [true]}', "token 0 is true, not a whole number"),
        "id too large": (b'{"tokens": [0, 257]}', "line 1: token 1 is 257, outside the vocabulary; legal: 0 to 256"),
        "id too small": (b'{"tokens": [-257]}', "token 0 is -257, outside the vocabulary"),
        "id of 100 digits": (b'{"tokens": [1%s]}' % (b"0" * 100), "token 0 is a number of 333 bits, outside"),
        "id of 5000 digits": (b'{"tokens": [%s]}' % (b"9" * 5000), "line 1: is not JSON"),
        "deep nesting": (b"[" * 100_000, "line 1: is not JSON"),
        "too many lines": (b"\n" * readers.MAX_DOCUMENTS, "has 1000001 lines; legal: at most 1000000 lines"),
    },
    "x.bin": {
        "cut in a line": (b'{"tokens": [1, 2]}\n{"tok', "x.bin, line 2: is not JSON"),
        "cut at a line": (b'{"tokens": [1, 2]}\n', "x.bin.meta: has 2 rows for 1 lines of x.bin"),
        "of lists": (b"[1,2]\n[3]\n", "x.bin, line 1: holds no list of tokens"),
    },
    "x.bin.meta": {
        "empty": (b"", "x.bin.meta: is empty"),
        "of junk": (b"\xff" * 99, "x.bin.meta, header: is not a NumPy array"),
        "cut in its magic": (header("(2, 2)")[:9], "header: is not a NumPy array"),
        "cut in its header": (header("(2, 2)")[:30], "header: does not describe rows of two whole"),
        "of floats": (saved([(0, 2), (19, 1)], "<f4"), "does not describe rows of two whole numbers"),
        "big endian": (saved([(0, 2), (19, 1)], ">i4"), "does not describe rows .* int32 or int64"),
        "pickled": (saved([{}, 1], "O"), "does not describe rows of two whole numbers"),
        "of three columns": (saved([(0, 2, 0), (19, 1, 0)]), r"has the shape \(2, 3\); legal: \(n, 2\)"),
        "without rows": (header("(0, 2)"), r"has the shape \(0, 2\); legal: \(n, 2\) with n from 1"),
        "of endless rows": (header("(999999999999, 2)"), r"has the shape \(999999999999, 2\)"),
        "cut in its rows": (header("(2, 2)") + bytes(15), "15 bytes of numbers, 16 announced"),
        "too long": (header("(2, 2)") + bytes(17), "17 bytes of numbers, 16 announced"),
        "negative offset": (saved([(-1, 2), (19, 1)]), r"row 0: is \(-1, 2\), a negative size"),
        "negative count": (saved([(0, 2), (19, -1)]), r"row 1: is \(19, -1\), a negative size"),
        "wrong offset": (saved([(0, 2), (20, 1)]), "row 1: says byte 20, but line 2 of x.bin starts at byte 19"),
        "count too large": (saved([(0, 2), (19, 2)]), "row 1: says 2 tokens, but line 2 of x.bin holds 1"),
        "count too small": (saved([(0, 1), (19, 1)]), "row 0: says 1 tokens, but line 1 of x.bin holds 2"),
        "a row too few": (saved([(0, 2)]), "has 1 rows for 2 lines of x.bin"),
    },
    "y.idx": {
        "empty": (b"", "y.idx: is empty"),
        "junk": (b"\xff" * 99, "y.idx, header: is not a Megatron index"),
        "cut in its header": (index()[:20], "y.idx, header: is not a Megatron index"),
        "version": (index(version=2), "has version 2 and token type 4; legal: version 1"),
        "tokens of floats": (index(code=7), "has version 1 and token type 7; legal: version 1, token type 1 3 4 5 8"),
        "endless sequences": (index(counts=(2**60, 3)), "announces 1152921504606846976 sequences"),
        "endless documents": (index(counts=(2, 2**60)), "and 1152921504606846976 document borders"),
        "cut in its tables": (index()[:-1], r"y.idx: is cut or too long: \d+ bytes"),
        "too long": (index(tail=b"123"), "is cut or too long"),
        "negative length": (
            index(lengths=(-2, 1)),
            "sequence 0: is -2 tokens at byte 0, outside the 12 bytes of y.bin",
        ),
        "negative offset": (index(offsets=(0, -4)), "sequence 1: is 1 tokens at byte -4, outside"),
        "offset inside a token": (index(offsets=(0, 7)), "sequence 1: is 1 tokens at byte 7, outside"),
        "truncated bin": (index(lengths=(2, 2)), "sequence 1: is 2 tokens at byte 8, outside the 12 bytes of y.bin"),
        "borders that fall": (
            index(lengths=(1, 1, 1), offsets=(0, 4, 8), borders=(0, 2, 1, 3)),
            "do not run from 0 up to 3",
        ),
        "borders that end early": (index(borders=(0, 1, 1)), "do not run from 0 up to 2"),
    },
    "y.bin": {
        "token too small": (struct.pack("<3i", 1, -1, 3), "token 1 is -1, outside the vocabulary; legal: 0 to 256"),
        "token too large": (struct.pack("<3i", 1, 257, 3), r"y\.bin, sequence 0: token 1 is 257, outside"),
    },
}
"""File -> how it is damaged -> its content, and what is said when it or its pair is read."""
WITH_INDEX = {"x.bin.meta": "x.bin", "y.idx": "y.bin"}


def write_pairs(folder: Path) -> None:
    """Write sound pairs of two sentences, InternEvo's x and Megatron's y."""
    write_internevo(folder / "x.bin", [torch.tensor([1, 2]), torch.tensor([3])])
    write_megatron(folder / "y.bin", index())


@pytest.mark.parametrize(("file", "how"), [(file, how) for file, ways in DAMAGED.items() for how in ways])
def test_a_damaged_file_is_refused(tmp_path: Path, file: str, how: str) -> None:
    content, message = DAMAGED[file][how]
    write_pairs(tmp_path)
    path = tmp_path / WITH_INDEX.get(file, file)
    if path.exists():
        assert read(path).ids.tolist() == [1, 2, 3], "sound before it is damaged"
    (tmp_path / file).write_bytes(content)
    check_refused(path, message)


def test_an_unreadable_file_or_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / "a.txt").write_text("a")
    with monkeypatch.context() as patch:  # permission bits would not stop a superuser
        patch.setattr(Path, "read_bytes", refuse)
        check_refused(tmp_path / "a.txt", r"a.txt: cannot be read \(Permission denied\); legal: a readable file")
    monkeypatch.setattr(os, "scandir", refuse)
    check_refused(tmp_path, r"cannot be listed \(Permission denied\); legal: a readable folder")


def test_too_much_data_is_refused_before_it_is_read(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(files.MAX_FILE_BYTES // 2 + 1)
    check_refused(tmp_path, r"holds 33554434 bytes in 2 files; legal: at most 33554432 bytes in all")
    with (tmp_path / "a.txt").open("wb") as file:
        file.truncate(10**12)
    check_refused(tmp_path / "a.txt", "holds 1000000000000 bytes, more than are read into memory")


@given(st.binary(min_size=1, max_size=200), st.sampled_from(["a.txt", "a.jsonl", "x.bin", "x.bin.meta", "y.idx"]))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_bytes_are_read_or_refused(tmp_path: Path, content: bytes, name: str) -> None:
    write_pairs(tmp_path)
    (tmp_path / "y.bin").write_bytes(content)
    (tmp_path / name).write_bytes(content)
    try:
        found = read(tmp_path / WITH_INDEX.get(name, name))
    except DataError as error:
        assert str(error).startswith(str(tmp_path))
    else:
        assert found.ids.abs().max() < 257
        assert sum(found.lengths) == found.ids.numel() > 0


@given(st.integers(0, 200), st.binary(min_size=1, max_size=4), st.booleans())
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_damage_to_a_meta_changes_what_is_read(tmp_path: Path, at: int, junk: bytes, meta: bool) -> None:
    """Damage to the `.bin` may change a digit, but never how many tokens a sentence has."""
    write_pairs(tmp_path)
    path = tmp_path / "x.bin"
    victim = path.with_suffix(".bin.meta") if meta else path
    content = bytearray(victim.read_bytes())
    content[at : at + len(junk)] = junk
    victim.write_bytes(content)
    try:
        found = read(path)
    except DataError as error:
        assert "x.bin" in str(error)
    else:
        assert found.lengths == (2, 1)
        assert not meta or found.ids.tolist() == [1, 2, 3]
