"""What-ifs of the steps: each held against the rule that was broken, in one or two steps that can be written down."""

from __future__ import annotations

import torch
from torch import Tensor

from reference.case import Case
from reference.model.parameters import full
from reference.training import subject as dense
from reference.what_ifs.training import trainings

CPU = torch.device("cpu")
SIZES = "mode=tp tp=1 layers=1 hidden=8 heads=2 kv_heads=2 ffn=12 seq=8 batch=2 vocab=264 micro=2 lr=0.1"
NAME = "layers.0.mlp.w1.weight"


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-10)


def test_a_step_that_is_not_taken_and_clipping_by_other_rules() -> None:
    case = Case.parse(f"{SIZES} steps=2 clip=0.05")
    found = trainings(case, CPU)
    for word, other in (("step_missing", case.but(steps=1)), ("unclipped", case.but(clip=0))):
        close(found[f"{word}/param/{NAME}"], dense.truth(other, CPU)[f"param/{NAME}"])
    case = case.but(steps=1, clip=1000.0)
    start, truth = full(case, NAME).double(), dense.truth(case, CPU)
    factor = 1000.0 / (truth["grad_norm/0"] + 1e-6)
    close(trainings(case, CPU)[f"clip_scales_up/param/{NAME}"], start - 0.1 * factor * truth[f"grad/{NAME}"])


def test_decay_that_is_forgotten() -> None:
    case = Case.parse(f"{SIZES} steps=1 optimizer=adamw")
    found, start = trainings(case, CPU), full(case, NAME).double()
    decayed = dense.truth(case, CPU)[f"param/{NAME}"] - found[f"decay_missing/param/{NAME}"]
    close(decayed, -0.1 * 0.01 * start)


def test_a_plain_step_has_no_other_rule() -> None:
    assert not trainings(Case.parse(f"{SIZES} steps=1"), CPU)


def test_a_tied_head_that_keeps_its_first_weights() -> None:
    """Hidden states follow from logits and weights; the same ones meet the first weights."""
    case = Case.parse(f"{SIZES} steps=2 tied=true")
    moved = dense.truth(case.but(steps=1), CPU)["param/embedding.tokens.weight"]
    hidden = torch.linalg.lstsq(moved, dense.truth(case, CPU)["logits/1"].flatten(0, 1).T).solution.T
    first = full(case, "embedding.tokens.weight").double()
    close(trainings(case, CPU)["untied/logits/1"].flatten(0, 1), hidden @ first.T)
    assert "untied/logits/1" not in trainings(case.but(tied=False), CPU)
