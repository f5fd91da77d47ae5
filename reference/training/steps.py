"""Training: all micro-batches of every data rank in every step, and the outcome under its canonical names.

Every mean is taken over all counted tokens of a step, whatever micro-batch or data rank they lie in. Gradients are the
sum of the micro-batches' summed-loss gradients divided by the step's token count. Optimizers are torch's own: SGD with
learning rate `lr`, AdamW with weight decay 0.01.

Activations are every module's output in the observed step and micro-batch, on all data ranks. `act/<module>` is the
output, `act_grad/<module>` the gradient in it of its micro-batch's summed loss: not yet divided by tokens, multiplied
by the loss scale of the step. Both are [dp*batch, seq, width], packed [dp, batch*seq, width]; outputs per head are
flattened to one width.

The state after each step has these names: parameters, and what the optimizer keeps of past gradients.

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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from shardproof.reference.case import Case
from shardproof.reference.checkpoints.foreign import steps_before, stored_tensors
from shardproof.reference.data.batches import Batch, micro_batch
from shardproof.reference.errors import CaseError
from shardproof.reference.model import decoder, layers
from shardproof.reference.model import losses as loss
from shardproof.reference.model.branch import Beside, updated_values, values_of
from shardproof.reference.model.decoder import PLAIN, Arithmetic
from shardproof.reference.model.losses import MetricTotals, metric_outcome, metric_totals, wide
from shardproof.reference.model.parameters import shapes
from shardproof.reference.training.reach import Reach, with_terms
from shardproof.reference.training.scaling import LossScale

LARGEST_STATES = 2**25
"""An outcome has the states of training only if they have at most this many elements, over all steps."""
_MOMENTS: Mapping[str, tuple[str, ...]] = {"sgd": (), "adamw": ("exp_avg", "exp_avg_sq")}


def holds_states(case: Case) -> bool:
    """Whether an outcome of the case has the states of training: not for a large model or many steps."""
    elements = sum(map(math.prod, shapes(case).values()))
    return case.steps * (1 + len(_MOMENTS[case.optimizer])) * elements <= LARGEST_STATES


def states_after(
    case: Case,
    step: int,
    parameters: Mapping[str, Tensor],
    stepper: torch.optim.Optimizer,
    *,
    updated: Mapping[str, Tensor] | None = None,
) -> Iterator[tuple[str, str, Tensor]]:
    """Yield (name in the outcome, parameter, a copy of the tensor) for the state after this step.

    `updated` are the tensors that the optimizer steps, by the parameters' names, if they are not the parameters.
    """
    if not holds_states(case):
        return
    for name, parameter in parameters.items():
        if step < case.steps - 1:
            yield f"param_after/{step}/{name}", name, parameter.detach().clone()
        moments = stepper.state.get((updated or parameters)[name], {})
        for moment in _MOMENTS[case.optimizer]:
            if moment in moments:  # an optimizer that took no step has none
                yield f"{moment}_after/{step}/{name}", name, moments[moment].clone()


def saved_checkpoint(
    case: Case, outcome: Mapping[str, Tensor], parameters: Mapping[str, Tensor], stepper: torch.optim.Optimizer
) -> dict[str, Tensor]:
    """The content of the checkpoint that the case saves, as "saved/<name>" of an outcome; empty without `save=`."""
    if not case.save:
        return {}
    last = ("param/", *(f"{moment}_after/{case.steps - 1}/" for moment in _MOMENTS[case.optimizer]))
    content = {f"saved/{name}": outcome[name] for kind in last for name in outcome if name.startswith(kind)}
    for name, parameter in parameters.items():
        if "step" in stepper.state.get(parameter, {}):
            content[f"saved/step_after/{case.steps - 1}/{name}"] = stepper.state[parameter]["step"].clone()
    return content | {"saved/steps": torch.tensor(steps_before(case) + case.steps)}


def load_checkpoint(case: Case, parameters: Mapping[str, Tensor], stepper: torch.optim.Optimizer) -> None:
    """Copy the checkpoint that the case loads, if any, into parameters and optimizer.

    Raises CaseError for a tensor that it lacks, or holds in another shape.
    """
    checkpoint = stored_tensors(case) if case.load else {}

    def read_stored(name: str, shape: torch.Size) -> Tensor:
        found = checkpoint.get(name)
        if found is None or found.shape != shape:
            rule = f"holds no {name} of shape {tuple(shape)}"
            raise CaseError("load", case.load, rule, "a checkpoint of the same model and training")
        return found

    with torch.no_grad():
        for name, parameter in parameters.items() if checkpoint else ():
            parameter.copy_(read_stored(f"model.{name}", parameter.shape))
            state = {key: checkpoint.get(f"optimizer.state.{name}.{key}") for key in _MOMENTS[case.optimizer]}
            if state and None not in state.values():  # none where every step was skipped
                state = {key: tensor.to(parameter, copy=True) for key, tensor in state.items() if tensor is not None}
                step = read_stored(f"optimizer.state.{name}.step", torch.Size()).clone()
                stepper.state[parameter] = {"step": step, **state}


def load_state(
    case: Case,
    step: int,
    parameters: Mapping[str, Tensor],
    stepper: torch.optim.Optimizer,
    states: Mapping[str, Tensor],
) -> None:
    """Copy the state after this step, from `states` under the names above, into parameters and optimizer."""
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(states[f"param_after/{step}/{name}"])
            moments = stepper.state.get(parameter, {})
            for moment in _MOMENTS[case.optimizer]:
                if moment in moments and f"{moment}_after/{step}/{name}" in states:  # none before a step that is taken
                    moments[moment].copy_(states[f"{moment}_after/{step}/{name}"])


LARGEST_LOGITS = 2**24
"""An outcome has the logits only if those of one step have at most this many elements."""
WEIGHT_DECAY = 0.01


class Feed(Protocol):
    """A source of micro-batches: `reference.data.batches.micro_batch`, or rows that a test drew itself."""

    def __call__(self, case: Case, step: int, micro: int, dp_rank: int, /, *, device: torch.device) -> Batch:
        """Micro-batch of a data rank, on the device."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Sums:
    """Sums of one step's forwards: scalars, logits, metric and activations.

    Logits are [dp*micro*batch, seq, vocab], or None when they are too large. The metric is that of every data rank, if
    the case has one. Activations are those of the observed micro-batch, if there is one. `reach` is filled only with a
    loss scale. `counts` are the integers that branches leave (`reference.model.branch`), with rows like those of the
    logits.
    """

    loss: Tensor
    tokens: Tensor
    logits: Tensor | None
    metrics: list[MetricTotals]
    activations: Mapping[str, Tensor]
    reach: Reach
    counts: Mapping[str, Tensor]


def train(
    case: Case,
    weights: Mapping[str, Tensor],
    *,
    feed: Feed = micro_batch,
    arithmetic: Arithmetic = PLAIN,
    last_first: bool = False,
    states: Mapping[str, Tensor] | None = None,
    dtype: torch.dtype | None = None,
    observed: tuple[int, int] | None = None,
) -> dict[str, Tensor]:
    """The outcome of training these full weights on their device, in their dtype or in `dtype`; they are not changed.

    `last_first` adds the gradients of the micro-batches in reversed order. `states` are the states after all steps but
    the last, under the names above: every step then begins at the given state, not at the model's own. `observed` adds
    the activations of this step and micro-batch to the outcome.
    """
    parameters = {
        name: weight.detach().to(dtype or weight.dtype, copy=True).requires_grad_() for name, weight in weights.items()
    }
    trained = _trained_tensors(case, parameters)
    stepper = _make_optimizer(case, trained, parameters)
    outcome, metrics = dict[str, Tensor](), list[dict[str, Tensor]]()
    activations: Mapping[str, Tensor] = {}
    scale, values = LossScale.of(case), values_of(case)
    for step in range(case.steps):
        if states is not None and step:
            load_state(case, step - 1, trained, stepper, states)
            _round_masters(case, trained, parameters)
            values = {name: states.get(f"value_after/{step - 1}/{name}", own) for name, own in values.items()}
        micro = observed[1] if observed and observed[0] == step else None
        backward = partial(_accumulate, case, parameters, values, step, feed, arithmetic, last_first, micro)
        sums, scaled, skipped = scale.run_step(step, backward, exact=dtype is not None)
        outcome |= _summed_up(sums, step)
        gradients = {n: _hand_gradient(parameters[n], w).div_(sums.tokens * scaled) for n, w in trained.items()}
        outcome |= scale.outcome(step, skipped=skipped)
        if micro is not None:
            activations = _observed_activations(sums, scale.value / scaled, skipped=skipped)
        scale.update(skipped=skipped)
        if skipped:
            stepper.zero_grad()  # an optimizer skips parameters without a gradient
        else:
            if step == 0:
                outcome |= {f"grad/{name}": grad.clone() if case.clip > 0 else grad for name, grad in gradients.items()}
            outcome[f"grad_norm/{step}"] = gradient_norm(gradients, arithmetic.squares)
            clip(gradients, outcome[f"grad_norm/{step}"], case.clip)
        stepper.step()
        _round_masters(case, trained, parameters)
        outcome |= {name: tensor for name, _, tensor in states_after(case, step, trained, stepper)}
        values = updated_values(case, values, sums.counts)
        outcome |= {f"value_after/{step}/{name}": value for name, value in values.items()}
        stepper.zero_grad()
        metrics = [_add_totals(*both) for both in zip(metrics, sums.metrics, strict=True)] if metrics else sums.metrics
    outcome |= _metrics(case, metrics) if metrics else {}
    outcome |= {f"param/{name}": weight.detach() for name, weight in trained.items()}
    return outcome | saved_checkpoint(case, outcome, trained, stepper) | scale.saved_state() | dict(activations)


def _summed_up(sums: Sums, step: int) -> dict[str, Tensor]:
    """The entries of an outcome about a step's forwards: tokens, loss, logits and counts."""
    found = {f"tokens/{step}": sums.tokens.long(), f"loss/{step}": sums.loss / sums.tokens}
    found |= {} if sums.logits is None else {f"logits/{step}": sums.logits}
    return found | {name.replace("/", f"/{step}/", 1): counts for name, counts in sums.counts.items()}


def _observed_activations(sums: Sums, factor: float, *, skipped: bool) -> Mapping[str, Tensor]:
    """The activations, and their gradients times this factor unless the step was skipped."""
    of_step = {name: x for name, x in sums.activations.items() if not (skipped and name.startswith("act_grad/"))}
    return {name: x * factor if name.startswith("act_grad/") else x for name, x in of_step.items()}


def _make_optimizer(
    case: Case, trained: Mapping[str, Tensor], parameters: Mapping[str, Tensor]
) -> torch.optim.Optimizer:
    """The optimizer before the first step; with `load=`, parameters and states are the checkpoint's."""
    stepper = optimizer(case, list(trained.values()))
    load_checkpoint(case, trained, stepper)
    _round_masters(case, trained, parameters)
    return stepper


def _trained_tensors(case: Case, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that the optimizer steps: the parameters, or with `master=float32` copies in at least that dtype."""
    if case.master == "none":
        return parameters
    return {name: weight.detach().to(wide(weight.dtype), copy=True) for name, weight in parameters.items()}


def _hand_gradient(parameter: Tensor, trained: Tensor) -> Tensor:
    """Move a parameter's gradient to the tensor that the optimizer steps, in its dtype, and return it."""
    if trained is not parameter:
        trained.grad, parameter.grad = _gradient(parameter).to(trained.dtype), None
    return _gradient(trained)


def _round_masters(case: Case, trained: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> None:
    """Copy the masters, if any, into the parameters, rounded to the case's dtype."""
    with torch.no_grad():
        for name, weight in trained.items() if case.master != "none" else ():
            parameters[name].copy_(weight.to(getattr(torch, case.dtype)))


def _accumulate(
    case: Case,
    parameters: Mapping[str, Tensor],
    values: Mapping[str, Tensor],
    step: int,
    feed: Feed,
    arithmetic: Arithmetic,
    last_first: bool,
    observed: int | None,
    scale: float,
) -> Sums:
    """Run every micro-batch of a step forward and backward; the parameters accumulate the summed loss's gradients.

    `observed` is the micro-batch whose activations are kept, if any.
    """
    device, dtype = next((weight.device, weight.dtype) for weight in parameters.values())
    for weight in parameters.values():
        weight.grad = None
    keep = case.dp * case.micro * case.tokens * case.vocab <= LARGEST_LOGITS
    places = [(data_rank, micro) for data_rank in range(case.dp) for micro in range(case.micro)]
    batches = {place: feed(case, step, place[1], place[0], device=device) for place in places}
    besides = {place: Beside(step=tuple(batches.values())) for place in places}
    losses, tokens, rows = {}, {}, {}
    metrics: dict[int, MetricTotals] = {}
    outputs: dict[int, dict[str, Tensor]] = {}
    reach = Reach(case=case)
    if case.scaler != "none" and wide(dtype) == dtype:
        arithmetic = with_terms(arithmetic, reach)
    for place in reversed(places) if last_first else places:
        data_rank, micro = place
        batch, beside = batches[place], besides[place]
        tapped = outputs.setdefault(data_rank, {}) if micro == observed else None
        tap = decoder.silent if tapped is None else partial(_keep_output, tapped)
        logits = decoder.logits(case, {**parameters, **values}, batch, tap=tap, arithmetic=arithmetic, beside=beside)
        summed, tokens[place] = loss.summed_loss(logits, batch.labels, batch.loss_mask, case.label_smoothing)
        total = sum(beside.losses, summed)
        if case.scaler == "none":
            total.backward()
        else:
            logits.register_hook(reach.meet_logits)
            (total * scale).backward()
            reach.meet_sums(parameters)
        losses[place] = summed.detach()
        if keep:
            rows[place] = logits.detach()
        if case.metric:
            found = metric_totals(logits, batch.labels, batch.loss_mask)
            metrics[data_rank] = _add_totals(metrics[data_rank], found) if data_rank in metrics else found
    return Sums(
        loss=torch.stack([losses[place] for place in places]).sum(),
        tokens=torch.stack([tokens[place] for place in places]).sum(),
        logits=torch.cat([rows[place] for place in places]) if keep else None,
        metrics=[metrics[data_rank] for data_rank in sorted(metrics)],
        activations=_join_outputs([outputs[data_rank] for data_rank in sorted(outputs)]),
        reach=reach,
        counts={name: torch.cat([besides[place].counts[name] for place in places]) for name in beside.counts},
    )


def _keep_output(outputs: dict[str, Tensor], module: str, output: Tensor) -> None:
    output.retain_grad()
    outputs[module] = output


def _join_outputs(outputs: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Every module's output and the gradient in it, end to end over the data ranks."""
    modules = list(outputs[0]) if outputs else []
    acts = {f"act/{name}": torch.cat([one[name].detach().flatten(2) for one in outputs]) for name in modules}
    slopes = {f"act_grad/{name}": torch.cat([_gradient(one[name]).flatten(2) for one in outputs]) for name in modules}
    return acts | slopes


def _metrics(case: Case, metrics: list[MetricTotals]) -> dict[str, Tensor]:
    return metric_outcome(metrics, exact=case.dtype == "float64")


def _add_totals(one: MetricTotals, other: MetricTotals) -> MetricTotals:
    return {name: value + other[name] for name, value in one.items()}


def _gradient(weight: Tensor) -> Tensor:
    assert weight.grad is not None  # every parameter of a case takes part in its forward pass, and every module
    return weight.grad


def gradient_norm(gradients: Mapping[str, Tensor], squares: Callable[[Tensor], Tensor] = layers.squares) -> Tensor:
    """The L2 norm of all gradients together, a scalar in `wide` of their dtype."""
    return torch.stack([squares(gradient.to(wide(gradient.dtype))) for gradient in gradients.values()]).sum().sqrt()


def clip(gradients: Mapping[str, Tensor], norm: Tensor, largest: float) -> None:
    """Scale all gradients in place by min(1, largest / (norm + 1e-6)); 0 switches clipping off."""
    if largest > 0:
        factor = min(1.0, largest / (float(norm) + 1e-6))
        for gradient in gradients.values():
            gradient.mul_(factor)


def optimizer(case: Case, parameters: list[Tensor]) -> torch.optim.Optimizer:
    """The case's optimizer over these leaf tensors."""
    if case.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr=case.lr, weight_decay=WEIGHT_DECAY)
    return torch.optim.SGD(parameters, lr=case.lr)
