"""What-ifs of the steps: parameters when one is not taken, or when clipping or weight decay follow another rule.

Keys as in `reference.what_ifs.inputs`; losses, logits and norms of the steps behind the first are given beside the
parameters.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from reference.case import Case
from reference.data.batches import micro_batch
from reference.model import decoder
from reference.model.given import takes_given
from reference.training.steps import train
from reference.what_ifs.inputs import weights_of


@takes_given
def trainings(case: Case, device: torch.device) -> dict[str, Tensor]:
    """Outcomes of training by other rules."""
    weights = weights_of(case, device)
    found = {} if case.steps == 1 else _told("step_missing", train(case.but(steps=case.steps - 1), weights), "param")
    if case.clip > 0:
        found |= _told("unclipped", train(case.but(clip=0), weights))
        found |= _told("clip_scales_up", train(case, weights, clipping=_to_largest))
    if case.optimizer == "adamw":
        found |= _told("decay_missing", train(case, weights, decay=0.0))
    if case.tied and case.steps > 1:
        found |= _untied(case, weights, device)
    return found


def _told(word: str, outcome: Mapping[str, Tensor], *kinds: str) -> dict[str, Tensor]:
    """Tensors of an outcome of these kinds, all by default, behind the first step."""
    return {
        f"{word}/{name}": tensor
        for name, tensor in outcome.items()
        if name.partition("/")[0] in (kinds or ("param", "logits", "loss", "grad_norm")) and not name.endswith("/0")
    }


def _to_largest(gradients: Mapping[str, Tensor], norm: Tensor, largest: float) -> None:
    """Clipping that scales a smaller norm up."""
    for gradient in gradients.values():
        gradient.mul_(largest / (float(norm) + 1e-6))


def _untied(case: Case, weights: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Logits of the second step when the tied head keeps the first step's weights."""
    moved = train(case.but(steps=1), weights)
    now = {name: moved[f"param/{name}"] for name in weights} | {"head.weight": weights["embedding.tokens.weight"]}
    places = [(data_rank, micro) for data_rank in range(case.dp) for micro in range(case.micro)]
    batches = [micro_batch(case, 1, micro, data_rank, device=device) for data_rank, micro in places]
    return {"untied/logits/1": torch.cat([decoder.logits(case.but(tied=False), now, batch) for batch in batches])}
