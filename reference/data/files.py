"""The files of a corpus, read as bytes without torch, and the one error of all readers."""

import os
import stat
from pathlib import Path

MAX_FILE_BYTES = 32 * 2**20


class DataError(ValueError):
    """Data that cannot be read: names the file, the place in it, the rule that it breaks and what is legal."""

    def __init__(self, path: str | Path, place: str, rule: str, legal: str) -> None:
        where = f"{path}, {place}" if place else str(path)
        super().__init__(f"{where}: {rule}; legal: {legal}")
        self.path, self.place, self.rule, self.legal = str(path), place, rule, legal


def status(path: Path) -> os.stat_result:
    """The status of a file or folder. Raises DataError when there is none."""
    try:
        return path.stat()
    except (OSError, ValueError) as error:  # ValueError: a path with a null byte
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise DataError(path, "", f"cannot be opened ({reason})", "a readable file or folder") from None


def load(path: Path) -> bytes:
    """All bytes of a regular file of 1 to MAX_FILE_BYTES bytes. Raises DataError for any other."""
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
