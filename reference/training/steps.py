"""Training: m micro-batches of every data rank for k steps, and the outcome under its canonical names.

Every mean is taken over all counted tokens of a step, whatever micro-batch or data rank they lie in. Gradients are the
sum of the micro-batches' summed-loss gradients divided by the step's token count. Optimizers are torch's own: SGD with
learning rate `lr`, AdamW with weight decay 0.01.

Activations are every module's output in micro-batch 0 of step 0, on all data ranks. `act/<module>` is the output,
`act_grad/<module>` the gradient in it of its micro-batch's SUMMED loss. The loss is over counted tokens, not yet
divided; times the first step's loss scale. Both are [dp*batch, seq, width], packed [dp, batch*seq, width]; outputs per
head are flattened to one width.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from shardproof.reference import losses as loss
from shardproof.reference.case import Case
from shardproof.reference.data.batches import Batch, micro_batch
from shardproof.reference.losses import MetricTotals, metric_outcome, metric_totals, wide
from shardproof.reference.model import decoder, layers
from shardproof.reference.model.branch import Beside, updated_values, values_of
from shardproof.reference.model.decoder import PLAIN, Arithmetic
from shardproof.reference.training.reach import Reach, with_terms
from shardproof.reference.training.scaling import LossScale
from shardproof.reference.training.states import after, begin, load, saved

LARGEST_LOGITS = 2**24
"""Elements of the full logits of one step above which an outcome leaves them out."""
WEIGHT_DECAY = 0.01


class Feed(Protocol):
    """Where micro-batches come from: `reference.data.batches.micro_batch`, or rows that a test drew itself."""

    def __call__(self, case: Case, step: int, micro: int, dp_rank: int, /, *, device: torch.device) -> Batch:
        """Micro-batch of a data rank, on the device."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Sums:
    """Sums of one step's forwards: scalars, logits, metric and activations.

    Logits are [dp*micro*batch, seq, vocab] or None when too large. The metric is of every data rank, when the case has
    one; activations are of micro-batch 0, when observed. `reach` is known with a loss scale. `counts`: integers that
    branches leave (`reference.model.branch`), rows as those of the logits.
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
    observed: bool = False,
) -> dict[str, Tensor]:
    """The outcome of training these full weights on their device and in their dtype, or in the one given.

    `last_first` adds the micro-batches' gradients in reversed order. `states` are the states after all steps but the
    last (`reference.training.states`). Every step then begins at the given state before it and not at the model's own.
    `observed` adds the activations. The given weights are left as they are.
    """
    parameters = {
        name: weight.detach().to(dtype or weight.dtype, copy=True).requires_grad_() for name, weight in weights.items()
    }
    trained = _trained(case, parameters)
    stepper = _begun(case, trained, parameters)
    outcome, metrics = dict[str, Tensor](), list[dict[str, Tensor]]()
    activations: Mapping[str, Tensor] = {}
    scale, values = LossScale.of(case), values_of(case)
    for step in range(case.steps):
        if states is not None and step:
            load(case, step - 1, trained, stepper, states)
            _rounded(case, trained, parameters)
            values = {name: states.get(f"value_after/{step - 1}/{name}", own) for name, own in values.items()}
        backward = partial(
            _accumulate, case, parameters, values, step, feed, arithmetic, last_first, observed and step == 0
        )
        sums, scaled, skipped = scale.taken(step, backward, exact=dtype is not None)
        outcome |= _summed_up(sums, step)
        gradients = {n: _handed(parameters[n], w).div_(sums.tokens * scaled) for n, w in trained.items()}
        outcome |= scale.outcome(step, skipped=skipped)
        scale.update(skipped=skipped)
        activations = _observed(sums, scale.value / scaled, skipped=skipped) if step == 0 else activations
        if skipped:
            stepper.zero_grad()  # an optimizer leaves alone what has no gradient
        else:
            if step == 0:
                outcome |= {f"grad/{name}": grad.clone() if case.clip > 0 else grad for name, grad in gradients.items()}
            outcome[f"grad_norm/{step}"] = gradient_norm(gradients, arithmetic.squares)
            clip(gradients, outcome[f"grad_norm/{step}"], case.clip)
        stepper.step()
        _rounded(case, trained, parameters)
        outcome |= {name: tensor for name, _, tensor in after(case, step, trained, stepper)}
        values = updated_values(case, values, sums.counts)
        outcome |= {f"value_after/{step}/{name}": value for name, value in values.items()}
        stepper.zero_grad()
        metrics = [_added(*both) for both in zip(metrics, sums.metrics, strict=True)] if metrics else sums.metrics
    outcome |= _metrics(case, metrics) if metrics else {}
    outcome |= {f"param/{name}": weight.detach() for name, weight in trained.items()}
    return outcome | saved(case, outcome, trained, stepper) | scale.saved() | dict(activations)


def _summed_up(sums: Sums, step: int) -> dict[str, Tensor]:
    """Entries of an outcome about a step's forwards."""
    found = {f"tokens/{step}": sums.tokens.long(), f"loss/{step}": sums.loss / sums.tokens}
    found |= {} if sums.logits is None else {f"logits/{step}": sums.logits}
    return found | {name.replace("/", f"/{step}/", 1): counts for name, counts in sums.counts.items()}


def _observed(sums: Sums, factor: float, *, skipped: bool) -> Mapping[str, Tensor]:
    """The activations and, but for a skipped step, their gradients times this factor."""
    of_step = {name: x for name, x in sums.activations.items() if not (skipped and name.startswith("act_grad/"))}
    return {name: x * factor if name.startswith("act_grad/") else x for name, x in of_step.items()}


def _begun(case: Case, trained: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> torch.optim.Optimizer:
    """The optimizer before the first step; with `load=`, parameters and states are the checkpoint's."""
    stepper = optimizer(case, list(trained.values()))
    begin(case, trained, stepper)
    _rounded(case, trained, parameters)
    return stepper


def _trained(case: Case, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors that the optimizer steps: the parameters, or with `master=float32` copies in at least that dtype."""
    if case.master == "none":
        return parameters
    return {name: weight.detach().to(wide(weight.dtype), copy=True) for name, weight in parameters.items()}


def _handed(parameter: Tensor, trained: Tensor) -> Tensor:
    """Move a parameter's gradient to the trained tensor, in its dtype; return it."""
    if trained is not parameter:
        trained.grad, parameter.grad = _gradient(parameter).to(trained.dtype), None
    return _gradient(trained)


def _rounded(case: Case, trained: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> None:
    """Round masters, if any, to the case's dtype into the parameters."""
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
    observed: bool,
    scale: float,
) -> Sums:
    """Run every micro-batch of a step forward and backward; gradients of the summed loss add up in the parameters."""
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
        tapped = outputs.setdefault(data_rank, {}) if observed and micro == 0 else None
        tap = decoder.silent if tapped is None else partial(_kept, tapped)
        logits = decoder.logits(case, {**parameters, **values}, batch, tap=tap, arithmetic=arithmetic, beside=beside)
        summed, tokens[place] = loss.summed(logits, batch.labels, batch.loss_mask, case.label_smoothing)
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
            metrics[data_rank] = _added(metrics[data_rank], found) if data_rank in metrics else found
    return Sums(
        loss=torch.stack([losses[place] for place in places]).sum(),
        tokens=torch.stack([tokens[place] for place in places]).sum(),
        logits=torch.cat([rows[place] for place in places]) if keep else None,
        metrics=[metrics[data_rank] for data_rank in sorted(metrics)],
        activations=_joined([outputs[data_rank] for data_rank in sorted(outputs)]),
        reach=reach,
        counts={name: torch.cat([besides[place].counts[name] for place in places]) for name in beside.counts},
    )


def _kept(outputs: dict[str, Tensor], module: str, output: Tensor) -> None:
    output.retain_grad()
    outputs[module] = output


def _joined(outputs: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Every module's output and the gradient in it, of all data ranks."""
    modules = list(outputs[0]) if outputs else []
    acts = {f"act/{name}": torch.cat([one[name].detach().flatten(2) for one in outputs]) for name in modules}
    slopes = {f"act_grad/{name}": torch.cat([_gradient(one[name]).flatten(2) for one in outputs]) for name in modules}
    return acts | slopes


def _metrics(case: Case, metrics: list[MetricTotals]) -> dict[str, Tensor]:
    return metric_outcome(metrics, exact=case.dtype == "float64")


def _added(one: MetricTotals, other: MetricTotals) -> MetricTotals:
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
