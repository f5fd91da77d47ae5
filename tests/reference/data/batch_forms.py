"""The three forms of micro-batches that tests run through; data as the tools of InternEvo and Megatron write them."""

import json
import struct
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from shardproof.reference.case import Case
from shardproof.reference.data.batches import IGNORED, Batch, micro_batch

FORMS = {
    "rows": "dp=3 tp=2 micro=2 steps=2",
    "packed": "preset=tiny-internlm2 dp=3 micro=2 steps=2",
    "sentences": "preset=tiny-internlm2 packed=false dp=3 micro=2 steps=2",
}
every_form = pytest.mark.parametrize("form", FORMS)


def all_batches(case: Case) -> Iterator[tuple[tuple[int, int, int], Batch]]:
    for step in range(case.steps):
        for micro in range(case.micro):
            for dp_rank in range(case.dp):
                yield (step, micro, dp_rank), micro_batch(case, step, micro, dp_rank)


def valid(batch: Batch) -> torch.Tensor:
    return batch.loss_mask * (batch.labels != IGNORED)


def equal(one: Batch, other: Batch) -> bool:
    names = ("tokens", "labels", "positions", "loss_mask", "cu_seqlens")
    pairs = [(getattr(one, name), getattr(other, name)) for name in names]
    return all(mine is theirs is None or torch.equal(mine, theirs) for mine, theirs in pairs)


def write_internevo(path: Path, documents: Sequence[Tensor]) -> None:
    """Write `x.bin` and `x.bin.meta` for these int64 documents."""
    lines = [json.dumps({"tokens": document.tolist()}).encode() + b"\n" for document in documents]
    path.write_bytes(b"".join(lines))
    starts = accumulate((len(line) for line in lines[:-1]), initial=0)
    rows = [(start, document.numel()) for start, document in zip(starts, documents, strict=True)]
    with path.with_name(path.name + ".meta").open("wb") as file:
        np.save(file, np.array(rows, dtype=np.int32))


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
    head = struct.pack("<QBQQ", version, code, *(counts or (len(lengths), len(borders))))
    tables = f"<{len(lengths)}i{len(offsets)}q{len(borders)}q"
    return magic + head + struct.pack(tables, *lengths, *offsets, *borders) + tail


def write_megatron(path: Path, idx: bytes) -> Path:
    """Write `x.bin` with the int32 tokens 1, 2 and 3, and its `x.idx`."""
    path.write_bytes(struct.pack("<3i", 1, 2, 3))
    path.with_suffix(".idx").write_bytes(idx)
    return path
