"""What-ifs of steps and metric: none where there is no other rule, what ranks drew; step 0 taken apart adds up."""

from __future__ import annotations

import pytest
import torch

from reference.case import Case
from reference.data.batches import micro_batch
from reference.model.parameters import full
from reference.training import given
from reference.training import subject as dense
from reference.training.control import control
from reference.what_ifs.shares import shares
from reference.what_ifs.training import WHAT_IFS
from tests.reference.what_ifs import broken

CPU = torch.device("cpu")
SIZES = "mode=tp tp=1 layers=1 hidden=8 heads=2 kv_heads=2 ffn=12 seq=8 batch=2 vocab=264 micro=2 lr=0.1"


def test_a_plain_step_has_no_other_rule() -> None:
    assert not broken(Case.parse(f"{SIZES} steps=1"), *(rule.id for rule in WHAT_IFS))


MEASURED_SIZES = "layers=1 hidden=16 heads=4 ffn=12 vocab=264 seq=8 batch=2 micro=3 steps=2 lr=0.1"
CASE = Case.parse(f"mode=mtp family=internlm2 tp=1 dp=2 metric=true {MEASURED_SIZES}")


def test_without_a_metric_there_is_none() -> None:
    assert broken(CASE.but(metric=False), "micro_missing") == {}


SHARED_SIZES = "tp=1 dp=3 layers=1 heads=2 kv_heads=2 hidden=8 ffn=12 seq=8 vocab=264 steps=2"


def test_what_ifs_take_what_ranks_drew() -> None:
    """Given the field's masks and initial values, they are those of the field in every bit."""
    field = Case.parse(f"mode=tp {SHARED_SIZES} dp=1 micro=1 metric=true dropout=0.2 attention_dropout=0.3 init=field")
    known = given.drawn(field)
    for function in (dense.truth, control, shares, lambda case, _device, **words: broken(case, **words)):
        right, found = function(field, CPU), function(field.but(random="stateful", init="shard"), CPU, given=known)
        assert right.keys() == found.keys() and all(torch.equal(found[name], right[name]) for name in right)
    with pytest.raises(ValueError, match="draws masks that the dense model must be given"):
        shares(field.but(random="stateful"), CPU)


def test_shares_add_up_to_the_gradients_of_the_first_step() -> None:
    case = Case.parse(f"mode=tp {SHARED_SIZES} micro=2")
    found, truth = shares(case, CPU), dense.truth(case, CPU)
    names = [name for name in truth if name.startswith("grad/")]
    assert {name for name in found if name.startswith("grad/")} == set(names)
    for name in names:
        torch.testing.assert_close(found[name].sum((0, 1)), truth[name], rtol=1e-12, atol=1e-14)
        parameter = name.removeprefix("grad/")
        assert torch.equal(found[f"start/{parameter}"], full(case, parameter))
    torch.testing.assert_close(found["loss"].sum(), truth["loss/0"], rtol=1e-12, atol=0)
    for data_rank, micro in ((0, 0), (2, 1)):
        batch = micro_batch(case, 0, micro, data_rank)
        assert found["tokens"][data_rank, micro] == (batch.loss_mask * (batch.labels != -100)).sum()


def test_a_row_without_borders_has_no_what_if_about_them() -> None:
    case = Case.parse(f"mode=tp {SHARED_SIZES} micro=1")
    assert not any(name.startswith("borders_ignored/") for name in broken(case))
