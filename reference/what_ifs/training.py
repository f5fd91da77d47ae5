"""What-ifs of the steps: parameters when one is not taken, or when clipping or weight decay follow another rule.

Losses, logits and norms of the steps behind the first are given beside the parameters.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from shardproof.reference.data.batches import micro_batch
from shardproof.reference.model import decoder
from shardproof.reference.training.steps import train
from shardproof.reference.what_ifs.what_if import Dense, Experiment, WhatIf

_BEHIND = ("param", "logits", "loss", "grad_norm")
_Readings = Iterator[tuple[str, Mapping[str, Tensor]]]


def _training(trained: Callable[[Dense], Mapping[str, Tensor] | None], *kinds: str) -> Experiment:
    """The outcome of another training behind the first step: names of these kinds, all by default."""

    def experiment(dense: Dense) -> _Readings:
        if outcome := trained(dense):
            named = {name for name in outcome if name.partition("/")[0] in (kinds or _BEHIND)}
            yield "", {name: outcome[name] for name in outcome if name in named and not name.endswith("/0")}

    return experiment


def _one_step_less(dense: Dense) -> Mapping[str, Tensor] | None:
    case = dense.case
    return train(case.but(steps=case.steps - 1), dense.weights) if case.steps > 1 else None


def _unclipped(dense: Dense) -> Mapping[str, Tensor] | None:
    return train(dense.case.but(clip=0), dense.weights) if dense.case.clip > 0 else None


def _scaled_up(dense: Dense) -> Mapping[str, Tensor] | None:
    return train(dense.case, dense.weights, clipping=_to_largest) if dense.case.clip > 0 else None


def _without_decay(dense: Dense) -> Mapping[str, Tensor] | None:
    return train(dense.case, dense.weights, decay=0.0) if dense.case.optimizer == "adamw" else None


def _to_largest(gradients: Mapping[str, Tensor], norm: Tensor, largest: float) -> None:
    """Clipping that scales a smaller norm up."""
    for gradient in gradients.values():
        gradient.mul_(largest / (float(norm) + 1e-6))


def _untied(dense: Dense) -> _Readings:
    """Logits of the second step when the tied head keeps the first step's weights."""
    case, weights = dense.case, dense.weights
    if case.tied and case.steps > 1:
        moved = train(case.but(steps=1), weights)
        now = {name: moved[f"param/{name}"] for name in weights} | {"head.weight": weights["embedding.tokens.weight"]}
        places = [(data_rank, micro) for data_rank in range(case.dp) for micro in range(case.micro)]
        batches = [micro_batch(case, 1, micro, data_rank, device=dense.device) for data_rank, micro in places]
        yield "", {"logits/1": torch.cat([decoder.logits(case.but(tied=False), now, batch) for batch in batches])}


_of_parameters = partial(WhatIf, explains=frozenset({"param"}))
WHAT_IFS = (
    _of_parameters(
        "untied", "when the tied head keeps its first weights: head and embedding are no longer one", _untied
    ),
    _of_parameters(
        "step_missing",
        "before the last step: it was not taken, or came after the parameters were read",
        _training(_one_step_less, "param"),
    ),
    _of_parameters("unclipped", "without clipping", _training(_unclipped)),
    _of_parameters("clip_scales_up", "when a norm below the limit is scaled up to it", _training(_scaled_up)),
    _of_parameters("decay_missing", "without weight decay", _training(_without_decay)),
)
