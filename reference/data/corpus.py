"""Files to documents of token ids: what `data=PATH` names, or real text that is on every machine.

A document is an int64 tensor [tokens]. The format follows the suffix: `.jsonl` JSON lines, `.bin` InternEvo (beside
`x.bin.meta`) or Megatron (beside `x.idx`). Anything else is UTF-8 text, one document a file (byte-level vocabulary:
`reference.data.readers`). A folder is read in sorted order, with its subfolders: its `.jsonl`, `.bin` and text files
(`TEXT_SUFFIXES`). Hidden files, other suffixes and empty text files are left out. Without a path the corpus is the
start of the Python standard library's sources.

Documents that were read are kept, as a pure function of the files' paths, times and sizes.

A case reads the corpus as one endless stream of tokens. The stream is cut at the end of every document and at random
places from `case.seed`, into sentences of uneven length. A window is a stretch of consecutive tokens and the one after
them. Window number n begins n * length tokens behind the place where this seed starts to read. When a short corpus
would give the same tokens again, it begins one token later.
"""

import math
import os
import stat
import sysconfig
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from shardproof.reference.case import Case
from shardproof.reference.data.files import MAX_FILE_BYTES, DataError, status
from shardproof.reference.data.readers import MAX_DOCUMENTS, json_lines, plain_text, read_internevo, read_megatron

TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst", ".py")
STANDARD_LIBRARY_BYTES = 512 * 2**10
"""How much of the standard library is read: whole files, in sorted order, until they hold this much."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A file of a corpus, and the index of its sentences' beginnings ("" if its format has none).

    `stamps`: time (ns) and size (bytes) of both, which stand for their content.
    """

    path: str
    index: str = ""
    stamps: tuple[tuple[int, int], ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of the file and its index."""
        return sum(size_bytes for _, size_bytes in self.stamps)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """A whole corpus: `ids` int64 [tokens], and the length of every document; the lengths sum to the tokens."""

    ids: Tensor
    lengths: tuple[int, ...]


def sources(case: Case) -> tuple[Source, ...]:
    """The files that `case.data` names, in reading order, as they are now on disk."""
    return _sources_at(Path(os.path.expanduser(case.data))) if case.data else _standard_library()


@lru_cache(maxsize=4)
def read(files: tuple[Source, ...], vocab: int) -> Tokens:
    """The corpus of these files, shared by all callers: not to be written to.

    Ids lie in [0, vocab), negative ones in token files mark prompts. Raises DataError, naming the file, the place in
    it, the rule and what is legal, if the data cannot be read or hold no token.
    """
    found = [document for file in files for document in _read_file(file, vocab)]
    kept = [document for document in found if document.numel()]
    if not kept:
        raise DataError(files[0].path, "", "and what was named with it hold no token", "at least one token")
    return Tokens(ids=torch.cat(kept), lengths=tuple(document.numel() for document in kept))


def _read_file(file: Source, vocab: int) -> list[Tensor]:
    path = Path(file.path)
    if file.index:
        return (read_internevo if file.index.endswith(".meta") else read_megatron)(path, vocab)
    return (json_lines if path.suffix == ".jsonl" else plain_text)(path, vocab)


def _sources_at(path: Path) -> tuple[Source, ...]:
    """The sources of a user's path: the file, or those in the folder."""
    if not stat.S_ISDIR(status(path).st_mode):
        return (_source(path),)
    found = tuple(_source(file) for file in _walk(path) if not file.name.startswith(".") and _readable(file))
    if not found:
        legal = "at least one file that ends in " + " ".join((".jsonl", ".bin", *TEXT_SUFFIXES))
        raise DataError(path, "", "is a folder without data", legal)
    if len(found) > MAX_DOCUMENTS or sum(source.size_bytes for source in found) > MAX_FILE_BYTES:
        rule = f"holds {sum(source.size_bytes for source in found)} bytes in {len(found)} files"
        raise DataError(path, "", rule, f"at most {MAX_FILE_BYTES} bytes in all: name a part of the data")
    return found


def _walk(folder: Path) -> list[Path]:
    """The files below a folder, sorted; hidden folders are left out, links to folders not followed."""
    files = []

    def refuse(error: OSError) -> None:
        raise DataError(error.filename, "", f"cannot be listed ({error.strerror})", "a readable folder") from None

    for root, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        files += [Path(root, name) for name in sorted(names)]
    return files


def _readable(file: Path) -> bool:
    """Whether a file inside a folder is data: a known suffix, and not an empty text such as `__init__.py`."""
    if file.suffix in TEXT_SUFFIXES:
        found = status(file)
        return found.st_size > 0 or not stat.S_ISREG(found.st_mode)
    return file.suffix in (".jsonl", ".bin")


def _source(path: Path) -> Source:
    if path.suffix in (".meta", ".idx"):
        raise DataError(path, "", "says only where sentences start", "the .bin file beside it")
    files = [path]
    if path.suffix == ".bin":
        indexes = [path.with_name(path.name + ".meta"), path.with_suffix(".idx")]
        beside = [file for file in indexes if os.path.exists(file)]
        if len(beside) != 1:
            rule = "stands beside " + (" and ".join(file.name for file in beside) or "no index")
            legal = f"either {indexes[0].name} (InternEvo) or {indexes[1].name} (Megatron)"
            raise DataError(path, "", rule, legal)
        files += beside
    stamps = tuple((found.st_mtime_ns, found.st_size) for found in map(status, files))
    return Source(path=str(path), index=str(files[1]) if len(files) > 1 else "", stamps=stamps)


@lru_cache(maxsize=1)
def _standard_library() -> tuple[Source, ...]:
    """The first modules of the running Python's standard library; they do not change while it runs."""
    folder = Path(sysconfig.get_path("stdlib"))
    chosen: list[Source] = []
    for file in sorted(folder.glob("*.py")):
        if sum(source.size_bytes for source in chosen) >= STANDARD_LIBRARY_BYTES:
            break
        if file.stat().st_size:
            chosen.append(_source(file))
    if not chosen:
        raise DataError(folder, "", "holds no sources of this Python", "data=PATH with a text of your own")
    return tuple(chosen)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stream:
    """All tokens of a corpus, int64 [N], where a sentence ends, bool [N], and where this seed starts to read."""

    ids: Tensor
    is_end: Tensor
    origin: int

    def windows(self, first: int, count: int, length: int) -> tuple[Tensor, Tensor]:
        """`count` windows from number `first` on, `length` tokens and the next: ids and is_end, [count, length + 1]."""
        size = len(self.ids)
        places = size // math.gcd(length, size)  # how many windows there are before one repeats
        number = torch.arange(first, first + count, device="cpu")
        start = self.origin + number * length + number // places
        place = (start[:, None] + torch.arange(length + 1, device="cpu")) % size
        return self.ids[place], self.is_end[place]


def stream_of(case: Case) -> Stream:
    """The stream that this case reads. Raises DataError if the corpus cannot be read."""
    return _stream(sources(case), case.vocab, case.seq, case.seed)


@lru_cache(maxsize=8)
def _stream(files: tuple[Source, ...], vocab: int, seq: int, seed: int) -> Stream:
    """The corpus cut into sentences of 2 to 5/4 seq tokens, and at the ends of its documents."""
    text = read(files, vocab)
    generator = torch.Generator(device="cpu").manual_seed(mix_seed(seed))
    high = max(2, seq + seq // 4)
    lengths = torch.randint(2, high + 1, (len(text.ids) // 2,), generator=generator, device="cpu")
    cuts = lengths.cumsum(0) - 1
    is_end = torch.zeros(len(text.ids), dtype=torch.bool, device="cpu")
    is_end[cuts[cuts < len(text.ids)]] = True
    is_end[torch.tensor(text.lengths, device="cpu").cumsum(0) - 1] = True
    return Stream(ids=text.ids, is_end=is_end, origin=mix_seed(seed, len(text.ids)) % len(text.ids))


def mix_seed(*words: int) -> int:
    """A 63-bit seed from several numbers; close numbers give distant seeds (multiply and fold, as in splitmix64)."""
    value = 0
    for word in words:
        value = ((value ^ word) + 0x9E3779B97F4A7C15) * 0xBF58476D1CE4E5B9 % 2**64
        value ^= value >> 31
    return value >> 1
