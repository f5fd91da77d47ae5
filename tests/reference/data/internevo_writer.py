"""InternEvo's tokenized data, written as its tools write them."""

import json
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
from torch import Tensor


def write_internevo(path: Path, documents: Sequence[Tensor]) -> None:
    """Write `x.bin` and `x.bin.meta` for these int64 documents."""
    lines = [json.dumps({"tokens": document.tolist()}).encode() + b"\n" for document in documents]
    path.write_bytes(b"".join(lines))
    starts = accumulate((len(line) for line in lines[:-1]), initial=0)
    rows = [(start, document.numel()) for start, document in zip(starts, documents, strict=True)]
    with path.with_name(path.name + ".meta").open("wb") as file:
        np.save(file, np.array(rows, dtype=np.int32))
