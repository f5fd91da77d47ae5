"""Tests of data/batches. Statements about the data of the reference hold for every case, each can fail, and edges of
shards are met.

The keys that pipeline stages are sent are typed from Megatron's tables.
"""

import importlib
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardproof.bugs.planting import planted_everywhere
from shardproof.bugs.record import read_bugs
from shardproof.parallel.communication.batch import sent_to_stage
from shardproof.reference.case import Case
from shardproof.reference.data.batches import IGNORED, Batch, micro_batch, own_edges, shard_edges, unread_rows
from shardproof.suites.mutants.catalogue import GROUPS, Mutant
from tests.reference.data import anchors as module
from tests.reference.data.batch_forms import FORMS, all_batches, every_form, valid
from tests.reference.model.dense_run import models


def broken(case: Case) -> list[str]:
    """The statements that do not hold."""
    return [name for name, (found, must) in module.anchors(case).items() if not torch.equal(found, must)]


TINY = "mode=mtp tp=1 layers=1 hidden=4 heads=1 kv_heads=1 ffn=8 vocab=11 positions=rope seq=2 batch=1 seed=1"
"""Two tokens a micro-batch, of which most end a sentence."""


@settings(max_examples=25, deadline=None)
@example(case=Case.parse(TINY), dp=3, micro=3, steps=1, packed=True)
@given(case=models(), dp=st.integers(1, 3), micro=st.integers(1, 3), steps=st.integers(1, 3), packed=st.booleans())
def test_every_statement_holds_for_every_case(case: Case, dp: int, micro: int, steps: int, packed: bool) -> None:
    form: dict[str, Any] = {"packed": True, "positions": "rope", "delivery": "local"} if packed else {}
    assert broken(case.but(dp=dp, micro=micro, steps=steps, **form)) == []


@every_form
@pytest.mark.parametrize("tokens", [[3], [*range(1, 8)], [-5, -6, -7, 8, 9, -3], [-1] * 9, [0, 0, 4]])
def test_every_statement_holds_for_short_corpora_and_prompts(tmp_path: Path, form: str, tokens: list[int]) -> None:
    file = tmp_path / "short.jsonl"
    file.write_text(json.dumps({"tokens": tokens}))
    assert broken(Case.parse(f"{FORMS[form]} data={file}")) == []


BUGS = {bug.name: bug for bug in read_bugs(Path(__file__).with_name("shared_data.txt"), Mutant, GROUPS)}


@pytest.mark.parametrize("name", ["no bug", *BUGS])
def test_a_bug_that_moves_truth_and_ranks_alike_breaks_a_statement(name: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"tokens": one}) for one in 40 * ([-5, -6, 7, 0, 8, 9, -3], [1, 2, 3])))
    with planted_everywhere(BUGS[name].sources() if name in BUGS else {}, ("shardproof.reference", "tests")):
        copy = importlib.import_module(module.__name__)
        cases = [f"{form}{more}" for form in FORMS.values() for more in ("", " seq=48 batch=3", f" data={file}")]
        found = [pair for text in cases for pair in copy.anchors(copy.Case.parse(text)).values()]
    assert all(torch.equal(*pair) for pair in found) is (name not in BUGS)


def _first(batch: Batch, field: str, change: Callable[[torch.Tensor], object]) -> Batch:
    tensor = getattr(batch, field).clone()
    change(tensor)
    return replace(batch, **{field: tensor})


def _crossed(batch: Batch) -> Batch:
    """The last token of the first sentence learns the first of the next."""
    assert batch.cu_seqlens is not None
    place = int(batch.cu_seqlens[1])
    return _first(batch, "labels", lambda labels: labels[0].__setitem__(place - 1, batch.tokens[0, place]))


@pytest.mark.parametrize(
    ("statement", "tampered"),
    [
        ("tokens of step 0", lambda batch: _first(batch, "tokens", lambda x: x[0, 5:7].copy_(x[0, 5:7].flip(0)))),
        ("labels of step 0", _crossed),
        ("tokens that lose their label", lambda batch: _first(batch, "labels", lambda x: x[:, :32].fill_(IGNORED))),
        ("positions of step 0", lambda batch: _first(batch, "positions", lambda x: x.copy_(torch.arange(64)[None]))),
        ("cu_seqlens of step 0", lambda batch: _first(batch, "cu_seqlens", lambda x: x[1].add_(1))),
        ("loss mask beside 0 and 1", lambda batch: _first(batch, "loss_mask", lambda x: x[0, 3].fill_(0.5))),
        ("micro-batches that count no token", lambda batch: _first(batch, "loss_mask", lambda x: x.zero_())),
    ],
)
def test_a_batch_that_is_tampered_with_breaks_its_statement(
    monkeypatch: pytest.MonkeyPatch, statement: str, tampered: Callable[[Batch], Batch]
) -> None:
    monkeypatch.setattr(module, "micro_batch", lambda *place: tampered(micro_batch(*place)))
    assert any(name.startswith(statement) for name in broken(Case.parse(FORMS["packed"])))


@pytest.mark.parametrize(
    "text",
    [
        *FORMS.values(),
        "mode=tp tp=4 kv_heads=4",
        "mode=tp-sp tp=3 heads=6 kv_heads=3 hidden=48 ffn=33 seq=33 vocab=641",
        "preset=tiny-internlm2 mode=isp tp=4 wp=2",
        "preset=tiny-internlm2 mode=isp tp=2 dp=2 wp=4 packed=false",
    ],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_both_ends_of_every_shard_are_read_and_learned_in_every_step(text: str, seed: int) -> None:
    case = Case.parse(f"{text} seed={seed}")
    sizes = {case.padded_vocab // parts for parts in (case.tp, case.wp)}
    ends = {row for size in sizes for shard in range(0, case.vocab, size) for row in (shard, shard + size - 1)}
    ends = {min(row, case.vocab - 1) for row in ends}
    assert ends == set(own_edges(case)) <= set(shard_edges(case))
    for step in range(case.steps):
        batches = [batch for (at, _, _), batch in all_batches(case) if at == step]
        assert ends <= {token for batch in batches for token in batch.tokens.flatten().tolist()}
        assert ends <= {label for batch in batches for label in batch.labels[valid(batch) > 0].tolist()}


@every_form
def test_edges_stand_in_place_of_single_tokens_and_do_not_follow_the_split(form: str) -> None:
    case = Case.parse(FORMS[form])
    for tp in (2, 4, 8):
        other = case.but(tp=tp, kv_heads=8, heads=8)
        assert own_edges(other) != own_edges(case) or tp == 2
        assert torch.equal(micro_batch(other, 0, 0, 0).tokens, micro_batch(case, 0, 0, 0).tokens)
        assert torch.equal(micro_batch(other, 0, 0, 0).labels, micro_batch(case, 0, 0, 0).labels)


def test_rows_that_nothing_looks_up_are_named(tmp_path: Path) -> None:
    file = tmp_path / "few.jsonl"
    file.write_text(json.dumps({"tokens": [1, 2, 4, 7, 250] * 60}))
    (line,) = unread_rows(Case.parse(f"data={file} vocab=256"))
    assert line == (
        "embedding.tokens.weight rows 0, 3, 5-6 and 2 ranges more "
        "(251 of 256 rows never looked up, first or last of a shard: 0, 127, 128, 255)"
    )


ALL = "tokens labels loss_mask attention_mask positions"
TABLE = {
    (True, True, False): (ALL, 28),
    (True, False, False): ("tokens attention_mask positions", 16),
    (False, True, False): ("labels loss_mask attention_mask", 12),
    (False, False, False): ("", 0),
    (False, True, True): (ALL, 28),
    (False, False, True): (ALL, 28),
}
"""(first, last, prediction layers) -> keys, and bytes a token without a mask."""
ROWS, LENGTH = 3, 7
_ITEM_BYTES = {"int64": 8, "float32": 4, "bool": 1}


@pytest.mark.parametrize("stage", TABLE)
def test_keys_and_bytes_of_a_stage(stage: tuple[bool, bool, bool]) -> None:
    first, last, prediction = stage
    keys, per_token = TABLE[stage]
    found = {
        mask: sent_to_stage(ROWS, LENGTH, first=first, last=last, mask=mask, prediction=prediction)
        for mask in (False, True)
    }
    assert list(found[True]) == keys.split()
    assert list(found[False]) == [key for key in keys.split() if key != "attention_mask"]
    for mask, forms in found.items():
        sent = sum(_ITEM_BYTES[dtype] * math.prod(shape) for dtype, shape in forms.values())
        assert sent == per_token * 21 + (147 if keys and mask else 0)
