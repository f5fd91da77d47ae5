"""InternEvo's tokenized data, written as its tools write them."""

import json
import struct
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from reference.data.internevo_files import meta_path

_MAGIC = b"\x93NUMPY"


def write_internevo(path: Path, documents: Sequence[Tensor]) -> None:
    """Write `x.bin` and `x.bin.meta` for these int64 documents, byte for byte as InternEvo's tools do.

    Offsets beyond 2 GiB are written as int64, where InternEvo's int32 would wrap around.
    """
    lines = [json.dumps({"tokens": document.tolist()}).encode() + b"\n" for document in documents]
    rows, start = [], 0
    for line, document in zip(lines, documents, strict=True):
        rows.append((start, document.numel()))
        start += len(line)
    letter = "i" if start < 2**31 else "q"
    descr = {"i": "<i4", "q": "<i8"}[letter]
    shape = (len(rows), 2) if rows else (0,)
    head = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}"
    # npy version 1.0: 6 magic bytes, 2 of version, 2 of length, and a header that ends on a multiple of 64, here 128
    head = head.ljust(117) + "\n"
    numbers = [number for row in rows for number in row]
    packed = struct.pack(f"<{len(numbers)}{letter}", *numbers)
    path.write_bytes(b"".join(lines))
    meta_path(path).write_bytes(_MAGIC + b"\x01\x00" + struct.pack("<H", len(head)) + head.encode() + packed)
