"""A model of Hugging Face beside the dense one on the same weights: logits, loss and every gradient, in float64."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from reference.case import Case
from reference.data.batches import Batch
from reference.model.parameters import shapes, weights
from tests.reference.model.dense_run import CPU, dense_run, ignored_labels, largest_difference

ALLOWED = 1e-10
Tensors = dict[str, Tensor]


def equal(
    case: Case,
    batch: Batch,
    model: torch.nn.Module,
    renamed: Callable[[Case, Tensors], Tensors],
    logits_of: Callable[[torch.nn.Module, Batch], Tensor],
    zero: str = "nowhere",
) -> None:
    """Assert that both are equal; `renamed` gives our tensors under their names, gradients that end in `zero` are 0."""
    missing, unexpected = model.load_state_dict(renamed(case, weights(case, CPU)), strict=False)
    assert unexpected == [] and missing == (["lm_head.weight"] if case.tied else [])
    logits = logits_of(model, batch)
    loss = functional.cross_entropy(logits.flatten(0, 1), ignored_labels(batch).flatten())
    loss.backward()
    found = dense_run(case, batch)
    assert found.gradients.keys() == shapes(case).keys()
    assert largest_difference(found.logits, logits) < ALLOWED
    assert abs(found.loss - loss.detach()) < ALLOWED
    gradients = renamed(case, found.gradients)
    right = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert gradients.keys() == right.keys()
    for name, gradient in right.items():
        if name.endswith(zero):
            assert gradients[name].abs().max() < ALLOWED and gradient.abs().max() < ALLOWED
        else:
            assert largest_difference(gradients[name], gradient) < ALLOWED, name


class DoubleTorch:
    """The module torch, where float32 is float64."""

    float = float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)
