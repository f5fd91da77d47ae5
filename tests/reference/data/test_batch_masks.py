"""Which tokens count: uneven over rows, data ranks and micro-batches, at least one, and never a prompt."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.case import Case
from reference.data.batches import micro_batch
from reference.data.packing import IGNORED
from tests.reference.data.batch_forms import FORMS, all_batches, every_form, valid


@every_form
@pytest.mark.parametrize("seed", range(5))
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


@given(dp=st.integers(1, 4), micro=st.integers(1, 4), batch=st.integers(1, 4), seq=st.integers(2, 40))
@settings(deadline=None)
def test_no_two_micro_batches_of_a_step_count_the_same(dp: int, micro: int, batch: int, seq: int) -> None:
    case = Case.of(mode="tp", tp=1, dp=dp, micro=micro, batch=batch, seq=seq, steps=1)
    counts = [int(valid(got).sum()) for _, got in all_batches(case)]
    room = case.tokens // 2
    assert max(counts) <= max(1, 3 * case.tokens // 4)
    assert len(set(counts)) == len(counts) or room < len(counts)


@every_form
def test_some_labels_are_ignored_and_some_learned_labels_are_masked(form: str) -> None:
    for _, batch in all_batches(Case.parse(FORMS[form])):
        assert (batch.labels == IGNORED).any()
        assert ((batch.labels != IGNORED) & (batch.loss_mask == 0)).any()


@every_form
def test_a_label_that_is_ignored_may_be_masked_or_not(form: str) -> None:
    for _, batch in all_batches(Case.parse(FORMS[form])):
        assert set(batch.loss_mask[batch.labels == IGNORED].tolist()) == {0.0, 1.0}


@every_form
def test_other_tokens_are_chosen_for_every_seed_step_rank_and_micro_batch(form: str) -> None:
    cases = [Case.parse(f"{FORMS[form]} seed={seed}") for seed in range(3)]
    chosen = [tuple(batch.loss_mask.flatten().tolist()) for case in cases for _, batch in all_batches(case)]
    assert len(set(chosen)) == len(chosen) == 36


def test_prompts_are_read_and_not_learned(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"tokens": [-11, -12, -13, 4, 5, 6, 7, 8]}\n' * 20)
    for form in FORMS.values():
        for _, batch in all_batches(Case.parse(f"{form} data={file}")):
            assert {11, 12, 13} & set(batch.tokens.flatten().tolist())
            assert not {11, 12, 13} & set(batch.labels.flatten().tolist())


@every_form
def test_nothing_but_prompts_still_leaves_a_token_to_learn(tmp_path: Path, form: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"tokens": [-100, -100, -100, -7]}\n')
    for _, batch in all_batches(Case.parse(f"{FORMS[form]} data={file}")):
        assert valid(batch).sum() >= 1
        assert batch.tokens.min() >= 0


@every_form
@given(seq=st.integers(1, 5), batch=st.integers(1, 4), seed=st.integers(0, 2**40), step=st.integers(0, 10**6))
@settings(deadline=None)
def test_the_smallest_sizes_hold_a_valid_token(form: str, seq: int, batch: int, seed: int, step: int) -> None:
    case = Case.parse(FORMS[form]).but(mode="tp" if form == "rows" else "mtp", tp=1, seq=seq, batch=batch, seed=seed)
    got = micro_batch(case, step, 1, 2)
    assert got.tokens.numel() == seq * batch
    assert valid(got).sum() >= 1
    assert got.positions.max() < got.max_seqlen <= seq
