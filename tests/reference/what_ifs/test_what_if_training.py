"""What-ifs of steps and metric, each held against the rule that was broken; step 0 taken apart adds up."""

from functools import partial

import pytest
import torch
from torch import Tensor

from shardproof.reference.case import Case
from shardproof.reference.data.batches import micro_batch
from shardproof.reference.model import decoder, metric
from shardproof.reference.model.parameters import full
from shardproof.reference.training import given
from shardproof.reference.training import subject as dense
from shardproof.reference.training.control import control
from shardproof.reference.what_ifs.shares import shares
from shardproof.reference.what_ifs.training import WHAT_IFS
from shardproof.reference.what_ifs.what_if import Dense
from tests.reference.what_ifs import CPU, broken

SIZES = "mode=tp tp=1 layers=1 hidden=8 heads=2 kv_heads=2 ffn=12 seq=8 batch=2 vocab=264 micro=2 lr=0.1"
TRAINING = [rule.id for rule in WHAT_IFS]
NAME = "layers.0.mlp.w1.weight"


close = partial(torch.testing.assert_close, rtol=1e-6, atol=1e-10)


def test_a_step_that_is_not_taken_and_clipping_by_other_rules() -> None:
    case = Case.parse(f"{SIZES} steps=2 clip=0.05")
    found = broken(case, *TRAINING)
    for word, other in (("step_missing", case.but(steps=1)), ("unclipped", case.but(clip=0))):
        close(found[f"{word}/param/{NAME}"], dense.truth(other, CPU)[f"param/{NAME}"])
    case = case.but(steps=1, clip=1000.0)
    start, truth = full(case, NAME).double(), dense.truth(case, CPU)
    factor = 1000.0 / (truth["grad_norm/0"] + 1e-6)
    close(broken(case, *TRAINING)[f"clip_scales_up/param/{NAME}"], start - 0.1 * factor * truth[f"grad/{NAME}"])


def test_decay_that_is_forgotten() -> None:
    case = Case.parse(f"{SIZES} steps=1 optimizer=adamw")
    found, start = broken(case, *TRAINING), full(case, NAME).double()
    decayed = dense.truth(case, CPU)[f"param/{NAME}"] - found[f"decay_missing/param/{NAME}"]
    close(decayed, -0.1 * 0.01 * start)
    assert not broken(Case.parse(f"{SIZES} steps=1"), *TRAINING), "a plain step has no other rule"


def test_a_tied_head_that_keeps_its_first_weights() -> None:
    """Hidden states follow from logits and weights; the same ones meet the first weights."""
    case = Case.parse(f"{SIZES} steps=2 tied=true")
    moved = dense.truth(case.but(steps=1), CPU)["param/embedding.tokens.weight"]
    hidden = torch.linalg.lstsq(moved, dense.truth(case, CPU)["logits/1"].flatten(0, 1).T).solution.T
    first = full(case, "embedding.tokens.weight").double()
    close(broken(case, *TRAINING)["untied/logits/1"].flatten(0, 1), hidden @ first.T)
    assert "untied/logits/1" not in broken(case.but(tied=False), *TRAINING)


MEASURED_SIZES = "layers=1 hidden=16 heads=4 ffn=12 vocab=264 seq=8 batch=2 micro=3 steps=2 lr=0.1"
CASE = Case.parse(f"mode=mtp family=internlm2 tp=1 dp=2 metric=true {MEASURED_SIZES}")


def of_some(step: int, micros: tuple[int, ...]) -> dict[str, Tensor]:
    """log_likelihood and tokens [dp] of these micro-batches of a step."""
    weights = Dense(CASE, CPU).weights
    if step:
        weights = {name: dense.truth(CASE, CPU)[f"param_after/{step - 1}/{name}"] for name in weights}
    found: dict[str, list[Tensor]] = {"tokens": [], "log_likelihood": []}
    for rank in range(CASE.dp):
        batches = [micro_batch(CASE, step, micro, rank, device=CPU) for micro in micros]
        sums = [metric.totals(decoder.logits(CASE, weights, b), b.labels, b.loss_mask) for b in batches]
        for name, rows in found.items():
            rows.append(torch.stack([one[name] for one in sums]).sum(0))
    return {name: torch.stack(rows) for name, rows in found.items()}


def test_readings_of_some_micro_batches() -> None:
    found, every = broken(CASE, "micro_missing"), (0, 1, 2)
    expected = {
        "newest": [of_some(1, (2,))],
        "oldest": [of_some(0, (0,))],
        "last": [of_some(0, (2,)), of_some(1, (2,))],
        "first": [of_some(0, (0,)), of_some(1, (0,))],
        "last_step": [of_some(1, every)],
        "first_step": [of_some(0, every)],
    }
    for reading, sums in expected.items():
        for name in ("tokens", "log_likelihood"):
            total = torch.stack([one[name] for one in sums]).sum(0)
            torch.testing.assert_close(found[f"micro_missing.{reading}/metric/{name}"], total)
    both = of_some(0, every)["log_likelihood"] + of_some(1, every)["log_likelihood"]
    torch.testing.assert_close(dense.truth(CASE, CPU)["metric/log_likelihood"], both)
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


def test_what_if_losses_are_those_of_the_same_logits_under_another_rule() -> None:
    case = Case.parse(f"mode=mtp family=internlm2 {SHARED_SIZES} packed=true micro=1")
    found, truth = broken(case), dense.truth(case, CPU)
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
    assert not any(
        name.startswith("borders_ignored/") for name in broken(Case.parse(f"mode=tp {SHARED_SIZES} micro=1"))
    )


def test_weights_of_another_module_or_layer_are_what_ifs_where_they_lie_apart() -> None:
    case = Case.parse(
        "mode=tp tp=1 layers=2 heads=2 kv_heads=2 hidden=8 ffn=12 seq=8 vocab=264 micro=1 activation=swiglu"
    )
    case = case.but(fuse_qkv=False, fuse_mlp=False)
    found, truth = broken(case), dense.true_activations(case, CPU)
    for word, first in (("gate_exchanged", "mlp.w1"), ("kv_exchanged", "attention.wk")):
        assert not torch.equal(found[f"{word}/act/layers.0.{first}"], truth[f"act/layers.0.{first}"])
    assert torch.equal(found["stale.layer/act/layers.0"], truth["act/layers.0"])
    assert not torch.equal(found["stale.layer/act/layers.1"], truth["act/layers.1"])
    others = case.but(experts=4, expert_ffn=12, dense_layers=1)  # the layer before has no experts
    found, truth = broken(others), dense.true_activations(others, CPU)
    assert not torch.equal(found["stale.layer/act/layers.1"], truth["act/layers.1"])
