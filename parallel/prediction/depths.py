"""The modules that predict further tokens, on the stage with the head: depth k (from 0) predicts k + 2 places on.

    hidden states | eh_proj [enorm(e) | hnorm(h)], e the embedding of the tokens k + 1 places on      | backward
    whole         | column linear of 2 * hidden features, all-gather of its features                  | own slice
    split         | the same, then own tokens                                                         | all-gather first

The output of eh_proj is whole or split again, so that its gradient is whole on every rank by then. Behind the gather of
features backward takes the own slice; a reduce-scatter there would count it once for every rank. Embedding and head are
the model's own, so that their gradients are sums over all uses. Source: Megatron-Core 0.16.1
`MultiTokenPredictionLayer` (experts.md 24.1).
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from parallel.communication import pairs
from parallel.communication.batch import Delivered
from parallel.layers.linear import ColumnLinear, column_linear
from parallel.layers.loss import counted
from parallel.layers.norm import Norm
from parallel.layers.terms import Terms
from parallel.layers.units import computed_later_again
from parallel.model.transformer import Transformer


class Projection(ColumnLinear):
    """A column linear whose features are gathered, and whose output lies as hidden states do."""

    def forward(self, x: Tensor) -> Tensor:
        """[.., .., 2 * hidden] -> hidden states."""
        axis, dim = self.region.axis, self.region.sequence_dim
        y = pairs.gather_from(column_linear(x, self.weight, self.bias, self.region), axis)
        return y if dim is None else pairs.scatter_to_sequence(y, axis, dim=dim)


class Depth(nn.Module):
    """A depth: two norms, the projection of both to hidden states, a transformer layer, the norm of the head."""

    def __init__(self, norms: Callable[[], Norm], eh_proj: Projection, layer: nn.Module) -> None:
        super().__init__()
        self.enorm, self.hnorm, self.eh_proj, self.layer, self.final_norm = norms(), norms(), eh_proj, layer, norms()

    def forward(self, embedded: Tensor, x: Tensor, batch: Delivered, model: Transformer) -> Tensor:
        """Hidden states of the depth before -> those of this depth, normed for the head."""
        both = torch.cat((self.enorm(embedded), self.hnorm(x)), -1)
        through = partial(self._through, batch, model)
        case = model.case
        if not (case.layers_again and torch.is_grad_enabled()):
            return through(both)
        return computed_later_again(through, both, early_stop=case.early_stop, distribute=None, contexts=model.contexts)

    def _through(self, batch: Delivered, model: Transformer, both: Tensor) -> Tensor:
        x = self.eh_proj(both)
        y: Tensor = self.final_norm(self.layer(x, model.rotary(batch, x.dtype), batch.attention_mask, batch.draw))
        return y


class Depths(nn.Module):
    """All depths. `factors` [depths] are what their summed losses are multiplied with in this step."""

    def __init__(
        self,
        depths: list[Depth],
        loss: Callable[[Tensor, Tensor], Tensor],
        laid_out: Callable[[Tensor], Tensor],
        terms: Terms,
    ) -> None:
        super().__init__()
        for number, depth in enumerate(depths):
            self.add_module(str(number), depth)
        self.loss, self.laid_out, self.terms = loss, laid_out, terms
        self.factors: Tensor | None = None

    def forward(self, logits: Tensor, x: Tensor, batch: Delivered, model: Transformer) -> Tensor:
        """The logits, to which the losses of all depths are attached; `x` are the decoder's normed hidden states."""
        assert self.factors is not None and model.embedding is not None
        total = torch.zeros((), dtype=self.factors.dtype, device=logits.device)
        for number, (factor, ahead) in enumerate(zip(self.factors, batch.ahead, strict=True)):
            embedded = model.embedding(ahead.tokens, ahead.positions)
            embedded = model.dropout.hidden(embedded, f"prediction.{number}.embedding", batch.draw)
            x = self.get_submodule(str(number))(embedded, x, batch, model)
            labels = self.laid_out(ahead.labels)
            losses = self.loss(model.logits(x), labels)
            weights = counted(labels, self.laid_out(ahead.loss_mask)).to(losses.dtype)
            total = total + factor * (losses * weights).sum()
        return self.terms.attached(logits, total)
