"""Files that cannot be data: each gives one DataError that names file, place, rule and what is legal."""

import io
import os
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reference.data import corpus, files, readers
from reference.data.files import DataError
from tests.reference.data.batch_forms import write_internevo


def read(path: Path, vocab: int = 257) -> corpus.Tokens:
    """The corpus at any path, those included that a case cannot spell, and without what was read before."""
    return corpus.read.__wrapped__(corpus._named(path), vocab)


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


FILES: dict[str, tuple[str, bytes, str]] = {
    "empty text": ("a.txt", b"", "a.txt: is empty; legal: a file with at least one token"),
    "not UTF-8": ("a.txt", b"ab\xff\xfe", "a.txt, byte 2: is not UTF-8"),
    "empty documents": ("a.jsonl", b'{"tokens": []}\n{"text": ""}', "hold no token"),
    "junk": ("a.jsonl", b"\x00\x01\x9f\xff\n", "line 1: is not UTF-8"),
    "cut": ("a.jsonl", b'{"text": "a"}\n{"tex', "line 2: is not JSON"),
    "no object": ("a.jsonl", b"[1, 2]", "line 1: must hold either a text or tokens"),
    "neither key": ("a.jsonl", b'{"txt": "a"}', "must hold either a text or tokens"),
    "both keys": ("a.jsonl", b'{"text": "a", "tokens": [1]}', "must hold either a text or tokens"),
    "text a number": ("a.jsonl", b'{"text": 5}', "text is 5, not a string"),
    "half a character": ("a.jsonl", b'{"text": "\\ud800"}', "half a surrogate pair at character 0"),
    "tokens a string": ("a.jsonl", b'{"tokens": "12"}', "holds no list of tokens"),
    "token a float": ("a.jsonl", b'{"tokens": [1, 2.0]}', "token 1 is 2.0, not a whole number"),
    "token a bool": ("a.jsonl", b'{"tokens": [true]}', "token 0 is true, not a whole number"),
    "id too large": (
        "a.jsonl",
        b'{"tokens": [0, 257]}',
        "line 1: token 1 is 257, outside the vocabulary; legal: 0 to 256",
    ),
    "id too small": ("a.jsonl", b'{"tokens": [-257]}', "token 0 is -257, outside the vocabulary"),
    "id of 100 digits": ("a.jsonl", b'{"tokens": [1%s]}' % (b"0" * 100), "token 0 is a number of 333 bits, outside"),
    "id of 5000 digits": ("a.jsonl", b'{"tokens": [%s]}' % (b"9" * 5000), "line 1: is not JSON"),
    "deep nesting": ("a.jsonl", b"[" * 100_000, "line 1: is not JSON"),
    "too many lines": ("a.jsonl", b"\n" * readers.MAX_DOCUMENTS, "has 1000001 lines; legal: at most 1000000 lines"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_text_or_jsonl_is_refused(tmp_path: Path, name: str) -> None:
    file, content, message = FILES[name]
    (tmp_path / file).write_bytes(content)
    check_refused(tmp_path / file, message)


def saved(rows: object, dtype: str = "<i4") -> bytes:
    """The `.npy` file of an array."""
    file = io.BytesIO()
    np.save(file, np.array(rows, dtype=dtype))
    return file.getvalue()


def header(shape: str) -> bytes:
    """The start of an `.npy` file that announces int32 numbers of this shape."""
    head = f"{{'descr': '<i4', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head


PAIRS: dict[str, tuple[str, bytes, str]] = {
    "bin cut in a line": ("x.bin", b'{"tokens": [1, 2]}\n{"tok', "x.bin, line 2: is not JSON"),
    "bin cut at a line": ("x.bin", b'{"tokens": [1, 2]}\n', "x.bin.meta: has 2 rows for 1 lines of x.bin"),
    "bin of lists": ("x.bin", b"[1,2]\n[3]\n", "x.bin, line 1: holds no list of tokens"),
    "empty meta": ("x.bin.meta", b"", "x.bin.meta: is empty"),
    "meta of junk": ("x.bin.meta", b"\xff" * 99, "x.bin.meta, header: is not a NumPy array"),
    "meta cut in its magic": ("x.bin.meta", header("(2, 2)")[:9], "header: is not a NumPy array"),
    "meta cut in its header": ("x.bin.meta", header("(2, 2)")[:30], "header: does not describe rows of two whole"),
    "meta of floats": ("x.bin.meta", saved([(0, 2), (19, 1)], "<f4"), "does not describe rows of two whole numbers"),
    "meta big endian": ("x.bin.meta", saved([(0, 2), (19, 1)], ">i4"), "does not describe rows .* int32 or int64"),
    "meta pickled": ("x.bin.meta", saved([{}, 1], "O"), "does not describe rows of two whole numbers"),
    "meta of three columns": ("x.bin.meta", saved([(0, 2, 0), (19, 1, 0)]), r"has the shape \(2, 3\); legal: \(n, 2\)"),
    "meta without rows": ("x.bin.meta", header("(0, 2)"), r"has the shape \(0, 2\); legal: \(n, 2\) with n from 1"),
    "meta of endless rows": ("x.bin.meta", header("(999999999999, 2)"), r"has the shape \(999999999999, 2\)"),
    "meta cut in its rows": ("x.bin.meta", header("(2, 2)") + bytes(15), "15 bytes of numbers, 16 announced"),
    "meta too long": ("x.bin.meta", header("(2, 2)") + bytes(17), "17 bytes of numbers, 16 announced"),
    "negative offset": ("x.bin.meta", saved([(-1, 2), (19, 1)]), r"row 0: is \(-1, 2\), a negative size"),
    "negative count": ("x.bin.meta", saved([(0, 2), (19, -1)]), r"row 1: is \(19, -1\), a negative size"),
    "wrong offset": (
        "x.bin.meta",
        saved([(0, 2), (20, 1)]),
        "row 1: says byte 20, but line 2 of x.bin starts at byte 19",
    ),
    "count too large": ("x.bin.meta", saved([(0, 2), (19, 2)]), "row 1: says 2 tokens, but line 2 of x.bin holds 1"),
    "count too small": ("x.bin.meta", saved([(0, 1), (19, 1)]), "row 0: says 1 tokens, but line 1 of x.bin holds 2"),
    "a row too few": ("x.bin.meta", saved([(0, 2)]), "has 1 rows for 2 lines of x.bin"),
}


def write_pair(folder: Path) -> Path:
    """A sound InternEvo pair of two sentences."""
    write_internevo(folder / "x.bin", [torch.tensor([1, 2]), torch.tensor([3])])
    return folder / "x.bin"


@pytest.mark.parametrize("name", PAIRS)
def test_a_damaged_internevo_pair_is_refused(tmp_path: Path, name: str) -> None:
    path = write_pair(tmp_path)
    assert read(path).ids.tolist() == [1, 2, 3], "sound before it is damaged"
    file, content, message = PAIRS[name]
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
    write_pair(tmp_path)
    (tmp_path / "y.bin").write_bytes(content)
    (tmp_path / name).write_bytes(content)
    try:
        found = read(tmp_path / {"x.bin.meta": "x.bin", "y.idx": "y.bin"}.get(name, name))
    except DataError as error:
        assert str(error).startswith(str(tmp_path))
    else:
        assert found.ids.abs().max() < 257
        assert sum(found.lengths) == found.ids.numel() > 0


@given(st.integers(0, 200), st.binary(min_size=1, max_size=4), st.booleans())
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_damage_to_a_meta_changes_what_is_read(tmp_path: Path, at: int, junk: bytes, meta: bool) -> None:
    """Damage to the `.bin` may change a digit, but never how many tokens a sentence has."""
    path = write_pair(tmp_path)
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
