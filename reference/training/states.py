"""The state of training after each step, by name: parameters, and what the optimizer keeps of past gradients.

    param_after/<step>/<param>        every step but the last, whose parameters are `param/<param>`
    exp_avg_after/<step>/<param>      adamw: the mean of gradients
    exp_avg_sq_after/<step>/<param>   adamw: the mean of their squares
    saved/<name>                      save=: what the checkpoint holds as param/<param> and as the last moments
    saved/steps                       save=: all steps that were run by then, those before `load=` among them
    saved/step_after/<step>/<param>   save=, adamw: the steps that changed the parameter, as torch counts them

From the state that an implementation returns, the dense model takes the next step by itself. So only the rounding of
one step is compared: training amplifies none of it, however many steps there are. Shapes are the parameters'.
"""

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from shardproof.reference.case import Case
from shardproof.reference.checkpoints.stored import steps_before, stored
from shardproof.reference.model.parameters import shapes

LARGEST_STATES = 2**25
"""Elements of all full states of a run above which an outcome leaves them out."""
_MOMENTS: Mapping[str, tuple[str, ...]] = {"sgd": (), "adamw": ("exp_avg", "exp_avg_sq")}


def kept(case: Case) -> bool:
    """Whether an outcome holds the states: not those of a run on large models or of many steps."""
    elements = sum(map(math.prod, shapes(case).values()))
    return case.steps * (1 + len(_MOMENTS[case.optimizer])) * elements <= LARGEST_STATES


def after(
    case: Case,
    step: int,
    parameters: Mapping[str, Tensor],
    stepper: torch.optim.Optimizer,
    *,
    updated: Mapping[str, Tensor] | None = None,
) -> Iterator[tuple[str, str, Tensor]]:
    """(name in the outcome, parameter, a copy of the tensor) of everything that this step left.

    `updated` are the tensors that the optimizer steps, by the parameters' names, where they are others than these.
    """
    if not kept(case):
        return
    for name, parameter in parameters.items():
        if step < case.steps - 1:
            yield f"param_after/{step}/{name}", name, parameter.detach().clone()
        moments = stepper.state.get((updated or parameters)[name], {})
        for moment in _MOMENTS[case.optimizer]:
            if moment in moments:  # an optimizer that took no step has none
                yield f"{moment}_after/{step}/{name}", name, moments[moment].clone()


def saved(
    case: Case, outcome: Mapping[str, Tensor], parameters: Mapping[str, Tensor], stepper: torch.optim.Optimizer
) -> dict[str, Tensor]:
    """Content of the checkpoint that the case saves, as "saved/<name>" of an outcome; nothing without `save=`.

    Counts of the optimizer's steps are included.
    """
    if not case.save:
        return {}
    last = ("param/", *(f"{moment}_after/{case.steps - 1}/" for moment in _MOMENTS[case.optimizer]))
    found = {f"saved/{name}": outcome[name] for kind in last for name in outcome if name.startswith(kind)}
    for name, parameter in parameters.items():
        if "step" in stepper.state.get(parameter, {}):
            found[f"saved/step_after/{case.steps - 1}/{name}"] = stepper.state[parameter]["step"].clone()
    return found | {"saved/steps": torch.tensor(steps_before(case) + case.steps)}


def begin(case: Case, parameters: Mapping[str, Tensor], stepper: torch.optim.Optimizer) -> None:
    """Put the checkpoint that the case loads, if any, into parameters and optimizer."""
    found = stored(case) if case.load else {}
    with torch.no_grad():
        for name, parameter in parameters.items() if found else ():
            parameter.copy_(found[f"model.{name}"])
            state = {key: found.get(f"optimizer.state.{name}.{key}") for key in _MOMENTS[case.optimizer]}
            if state and None not in state.values():  # none where every step was skipped
                state = {key: tensor.to(parameter, copy=True) for key, tensor in state.items() if tensor is not None}
                stepper.state[parameter] = {"step": found[f"optimizer.state.{name}.step"].clone(), **state}


def load(
    case: Case,
    step: int,
    parameters: Mapping[str, Tensor],
    stepper: torch.optim.Optimizer,
    states: Mapping[str, Tensor],
) -> None:
    """Put the state after this step, from `states` under the names above, into parameters and optimizer."""
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(states[f"param_after/{step}/{name}"])
            moments = stepper.state.get(parameter, {})
            for moment in _MOMENTS[case.optimizer]:
                if moment in moments and f"{moment}_after/{step}/{name}" in states:  # none before a step that is taken
                    moments[moment].copy_(states[f"{moment}_after/{step}/{name}"])
