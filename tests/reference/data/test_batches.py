"""Micro-batches: distinct for every data rank, a pure function of the case; which tokens count; packs by hand.

Laws of packing are statements of `tests.reference.data.anchors`, which test_anchors.py holds against every form.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from shardproof.reference.case import Case
from shardproof.reference.data import readers
from shardproof.reference.data.batches import build_pack, build_unpack, micro_batch
from tests.reference.data.batch_forms import FORMS, all_batches, equal, every_form, valid


@every_form
def test_shapes_and_dtypes_are_those_of_the_contract(form: str) -> None:
    case = Case.parse(FORMS[form])
    shape = (1, 64) if case.packed else (2, 32)
    for _, batch in all_batches(case):
        for tensor in (batch.tokens, batch.labels, batch.positions):
            assert tensor.shape == shape
            assert tensor.dtype == torch.int64
        assert batch.loss_mask.shape == shape
        assert batch.loss_mask.dtype == torch.float32
        assert set(batch.loss_mask.unique().tolist()) == {0.0, 1.0}
        assert 0 <= batch.tokens.min() <= batch.tokens.max() < case.vocab
        assert batch.labels.max() < case.vocab
        assert batch.positions.max() < case.seq


@every_form
def test_tokens_are_a_view_that_is_not_contiguous_when_there_are_rows(form: str) -> None:
    case = Case.parse(FORMS[form])
    assert not micro_batch(case, 0, 0, 0).tokens.is_contiguous()
    assert micro_batch(case.but(batch=1), 0, 0, 0).tokens.is_contiguous()
    narrow = case.but(seq=1, batch=2, tp=1, mode="mtp" if case.family != "gpt" else "tp")
    assert not micro_batch(narrow, 0, 0, 0).tokens.is_contiguous()


@every_form
def test_data_and_what_counts_differ_between_seeds_steps_ranks_micro_batches_and_rows(form: str) -> None:
    batches = [batch for seed in range(3) for _, batch in all_batches(Case.parse(f"{FORMS[form]} seed={seed}"))]
    assert len(batches) == 36
    for name in ("tokens", "loss_mask"):
        assert len({tuple(getattr(batch, name).flatten().tolist()) for batch in batches}) == len(batches)
    if form != "packed":
        rows = [tuple(row) for batch in batches[:12] for row in batch.tokens.tolist()]
        assert len(set(rows)) == len(rows)


@every_form
def test_a_batch_follows_from_the_case_alone(form: str) -> None:
    case = Case.parse(FORMS[form])
    state = torch.random.get_rng_state()
    first = micro_batch(case, 1, 1, 2)
    assert torch.equal(torch.random.get_rng_state(), state), "the callers' random numbers are their own"
    torch.manual_seed(99)
    first.tokens.add(1)
    assert equal(first, micro_batch(Case.parse(str(case)), 1, 1, 2))
    assert equal(first, micro_batch(case.but(tp=1, layers=1, dtype="float32", steps=9), 1, 1, 2))
    assert not equal(first, micro_batch(case.but(seed=1), 1, 1, 2))


def test_opt_and_llama_take_their_form_from_the_family() -> None:
    opt = micro_batch(Case.parse("family=opt vocab=258"), 0, 0, 0)
    llama = [batch for _, batch in all_batches(Case.parse("family=llama vocab=264 steps=4"))]
    assert (opt.tokens == 0).sum() == 1, "the first id of a shard, and no padding"
    assert any((batch.tokens == 0).sum() > 1 for batch in llama)


def test_a_device_is_honoured() -> None:
    batch = micro_batch(Case.parse(FORMS["packed"]), 0, 0, 0, device="meta")
    assert batch.cu_seqlens is not None
    tensors = (batch.tokens, batch.labels, batch.positions, batch.loss_mask, batch.cu_seqlens)
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert not batch.tokens.is_contiguous()


@every_form
def test_the_callers_defaults_change_nothing(tmp_path: Path, form: str) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("To be, or not to be, that is the question. " * 40)
    plain = micro_batch(Case.parse(f"{FORMS[form]} data={tmp_path / 'a.txt'}"), 0, 0, 0)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"), torch.inference_mode():
            changed = micro_batch(Case.parse(f"{FORMS[form]} data={tmp_path / 'b.txt'}"), 0, 0, 0)
    finally:
        torch.set_default_dtype(torch.float32)
    assert changed.loss_mask.dtype == torch.float32
    assert equal(plain, changed)


def test_a_micro_batch_that_is_not_there_is_refused_by_name() -> None:
    case = Case.parse("dp=2 micro=3")
    with pytest.raises(ValueError, match=r"dp_rank=2: must lie in \[0, 2\); legal: dp_rank=0"):
        micro_batch(case, 0, 0, 2)
    with pytest.raises(ValueError, match=r"micro=3: must lie in \[0, 3\)"):
        micro_batch(case, 0, 3, 0)
    with pytest.raises(ValueError, match=r"step=-1: must lie in \[0, inf\)"):
        micro_batch(case, -1, 0, 0)


class Operations(TorchDispatchMode):
    """Counts the tensor operations inside its block."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@every_form
def test_a_micro_batch_is_a_few_operations_and_reads_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """At 2 to 4 us an operation: the budget of 0.5 ms, counted because clocks of shared machines are no proof."""
    file = tmp_path / "a.txt"
    file.write_text("To be, or not to be, that is the question. " * 400)
    case = Case.parse(f"{FORMS[form]} data={file} seq=2048")
    micro_batch(case, 0, 0, 0)
    monkeypatch.setattr(readers, "load", None)
    with Operations() as operations:
        micro_batch(case, 1, 0, 0)
    assert operations.count <= 130


@every_form
@pytest.mark.parametrize("seed", [0, 3])
def test_valid_tokens_are_uneven_over_rows_ranks_and_micro_batches(form: str, seed: int) -> None:
    case = Case.parse(FORMS[form] + f" seed={seed} steps=1")
    batches = dict(all_batches(case))
    counts = {place: int(valid(batch).sum()) for place, batch in batches.items()}
    ranks = [sum(counts[0, micro, rank] for micro in range(case.micro)) for rank in range(case.dp)]
    micros = [sum(counts[0, micro, rank] for rank in range(case.dp)) for micro in range(case.micro)]
    assert min(counts.values()) >= 1
    assert len(set(ranks)) == len(ranks)
    assert len(set(micros)) == len(micros)
    assert form == "sentences" or list(counts.values()) == [47, 40, 33, 26, 19, 12]
    rows = [valid(batch).sum(dim=1).tolist() for batch in batches.values()]
    assert case.packed or sum(len(set(row)) > 1 for row in rows) >= len(rows) - 1


@every_form
@given(seq=st.integers(1, 5), batch=st.integers(1, 4), seed=st.integers(0, 2**40), step=st.integers(0, 10**6))
@settings(deadline=None)
def test_the_smallest_sizes_hold_a_valid_token(form: str, seq: int, batch: int, seed: int, step: int) -> None:
    case = Case.parse(FORMS[form]).but(mode="tp" if form == "rows" else "mtp", tp=1, seq=seq, batch=batch, seed=seed)
    got = micro_batch(case, step, 1, 2)
    assert got.tokens.numel() == seq * batch
    assert valid(got).sum() >= 1
    assert got.positions.max() < seq


def test_packing_leaves_its_input_alone() -> None:
    sentences = [torch.arange(1, 8), torch.arange(0), torch.arange(8, 10)]
    packs = build_pack(sentences, packed_length=8, seq_len=3)
    assert [token for pack in packs for token in pack.tokens.flatten().tolist() if token] == [*range(1, 10)]
    for rows in (*packs, build_unpack(sentences, micro_bsz=2, seq_len=3)):
        rows.tokens.fill_(-1)
        rows.labels.fill_(-1)
    assert torch.cat(sentences).tolist() == [*range(1, 10)]
