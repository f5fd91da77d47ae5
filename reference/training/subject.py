"""The dense subject: the case on one rank, without torch.distributed, and the truth that every subject is held against.

The truth of a low-precision case is computed in float64 from the weights rounded to the case's dtype. So a subject is
charged for its arithmetic only, never for the rounding of its inputs.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from reference.case import Case
from reference.model.given import takes_given
from reference.model.parameters import weights
from reference.training.divergence import refuse_divergence
from reference.training.given import drawn
from reference.training.steps import train


def subject(case: Case, device: torch.device) -> dict[str, Tensor]:
    """The outcome of dense training in the case's dtype: every tensor full."""
    return train(case, weights(case, device)) | drawn(case)


@takes_given
def truth(case: Case, device: torch.device, *, states: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Outcome and activations (see reference.activations), with all arithmetic in float64.

    `given`: what it must be given, by name (see reference.training.given).
    `states`: those that an implementation returned, from which every step begins (see reference.states). Without them
    a case whose training leaves what can be judged raises CaseError (see reference.divergence).
    """
    rounded = weights(case, device)
    outcome = train(case, rounded, dtype=torch.float64, states=states, observed=True)
    if states is None:
        refuse_divergence(case, rounded, outcome)
    return drawn(case) | outcome


def activations(case: Case, device: torch.device) -> dict[str, Tensor]:
    """`act/<module>` and `act_grad/<module>` of the dense model in the case's dtype (see reference.activations)."""
    from reference.training.activations import observe  # noqa: PLC0415

    return observe(case, weights(case, device))


def true_activations(case: Case, device: torch.device) -> dict[str, Tensor]:
    """Activations with all arithmetic in float64; for float64 cases they are `activations`."""
    from reference.training.activations import observe  # noqa: PLC0415

    return observe(case, {name: weight.to(torch.float64) for name, weight in weights(case, device).items()})
