"""Step 0 taken apart adds up to the dense gradient; what-ifs are the dense model on data read otherwise."""

from __future__ import annotations

import pytest
import torch

from reference.case import Case
from reference.data.batches import micro_batch
from reference.model.parameters import full
from reference.training import given
from reference.training import subject as dense
from reference.training.control import control
from reference.what_ifs.inputs import alternatives
from reference.what_ifs.metrics import metrics
from reference.what_ifs.rules import rules
from reference.what_ifs.shares import shares
from reference.what_ifs.training import trainings

CPU = torch.device("cpu")
SIZES = "tp=1 dp=3 layers=1 heads=2 kv_heads=2 hidden=8 ffn=12 seq=8 vocab=264 steps=2"


def test_what_ifs_take_what_ranks_drew() -> None:
    """Given the field's masks and initial values, they are those of the field in every bit."""
    field = Case.parse(f"mode=tp {SIZES} dp=1 micro=1 metric=true dropout=0.2 attention_dropout=0.3 init=field")
    known = given.drawn(field)
    for what_ifs in (dense.truth, control, shares, alternatives, rules, trainings, metrics):
        right, found = what_ifs(field, CPU), what_ifs(field.but(random="stateful", init="shard"), CPU, given=known)
        assert right.keys() == found.keys() and all(torch.equal(found[name], right[name]) for name in right)
    with pytest.raises(ValueError, match="draws masks that the dense model must be given"):
        shares(field.but(random="stateful"), CPU)


def test_shares_add_up_to_the_gradients_of_the_first_step() -> None:
    case = Case.parse(f"mode=tp {SIZES} micro=2")
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


def test_what_if_losses_are_those_of_the_same_logits_under_another_rule() -> None:
    case = Case.parse(f"mode=mtp family=internlm2 {SIZES} packed=true micro=1")
    found, truth = alternatives(case, CPU), dense.truth(case, CPU)
    log = truth["logits/0"].log_softmax(-1)
    batches = [micro_batch(case, 0, 0, data_rank) for data_rank in range(3)]
    labels, tokens, mask = (
        torch.cat([getattr(b, what) for b in batches]) for what in ("labels", "tokens", "loss_mask")
    )
    known = labels != -100

    def mean(said: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        losses = -log.gather(-1, said.clamp(min=0)[..., None])[..., 0]
        return (losses * weights).sum() / weights.sum()

    expected = {
        "mask_ignored": mean(labels, known.double()),
        "padding_learned": mean(labels, mask.double()),
        "labels_unshifted": mean(tokens, (mask * known).double()),
    }
    for word, loss in expected.items():
        torch.testing.assert_close(found[f"{word}/loss/0"], loss, rtol=1e-12, atol=0)
    assert not torch.allclose(found["borders_ignored/act/layers.0"], dense.true_activations(case, CPU)["act/layers.0"])


def test_a_row_without_borders_has_no_what_if_about_them() -> None:
    case = Case.parse(f"mode=tp {SIZES} micro=1")
    assert not any(name.startswith("borders_ignored/") for name in alternatives(case, CPU))


def test_weights_of_another_module_or_layer_are_what_ifs_where_they_lie_apart() -> None:
    case = Case.parse(
        "mode=tp tp=1 layers=2 heads=2 kv_heads=2 hidden=8 ffn=12 seq=8 vocab=264 micro=1 activation=swiglu"
    )
    case = case.but(fuse_qkv=False, fuse_mlp=False)
    found, truth = alternatives(case, CPU), dense.true_activations(case, CPU)
    for word, first in (("gate_exchanged", "mlp.w1"), ("kv_exchanged", "attention.wk")):
        assert not torch.equal(found[f"{word}/act/layers.0.{first}"], truth[f"act/layers.0.{first}"])
    assert torch.equal(found["stale.layer/act/layers.0"], truth["act/layers.0"])
    assert not torch.equal(found["stale.layer/act/layers.1"], truth["act/layers.1"])
