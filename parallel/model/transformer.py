"""The decoder of every family under any strategy: it builds what the strategy gives and knows no collective.

Pre-norm residual blocks, x += attention(norm(x)); x += mlp(norm(x)). Module names are the canonical ones: embedding,
layers.{i}.attention_norm, layers.{i}.attention.wqkv ..., final_norm, head. Hidden states lie as the strategy says.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from shardproof.parallel.communication.batch import Delivered
from shardproof.parallel.communication.schedules import Stage, units
from shardproof.parallel.layers.attention import Attention, HeadShape, rotary_table
from shardproof.parallel.layers.block import Mlp, Norm
from shardproof.parallel.layers.randomness import Draw, Dropout
from shardproof.parallel.layers.recompute import checkpoint_unit
from shardproof.parallel.layers.roles import attention_linears, head_norms, mlp_linears
from shardproof.parallel.model.strategy import Parts, Strategy
from shardproof.reference.case import Case
from shardproof.reference.model.parameters import dtype_of


class Layer(nn.Module):
    """A block: attention, then MLP, then the modules `behind`. Each of the first two reads its norm's output, and its
    own output is added to hidden states after dropout.
    """

    def __init__(
        self,
        attention_norm: Norm,
        attention: nn.Module,
        mlp_norm: Norm,
        mlp: nn.Module,
        name: str,
        dropout: Dropout,
        behind: Mapping[str, nn.Module],
    ) -> None:
        super().__init__()
        self.name, self.dropout, self.behind = name, dropout, tuple(behind)
        for leaf, module in behind.items():
            self.add_module(leaf, module)
        self.attention_norm, self.attention = attention_norm, attention
        self.mlp_norm, self.mlp = mlp_norm, mlp

    def forward(self, x: Tensor, table: tuple[Tensor, Tensor] | None, hidden_B1SS: Tensor | None, draw: Draw) -> Tensor:
        """Hidden states -> hidden states; `draw` names their step and micro-batch."""
        vars(self.mlp)["draw"] = draw  # a module that a feature puts here may read it
        x = x + self._dropout_of("attention", self.attention(self.attention_norm(x), table, hidden_B1SS, draw), draw)
        y: Tensor = x + self._dropout_of("mlp", self.mlp(self.mlp_norm(x)), draw)
        for leaf in self.behind:
            y = self.get_submodule(leaf)(y)
        return y

    def _dropout_of(self, branch: str, x: Tensor, draw: Draw) -> Tensor:
        return self.dropout.hidden(x, f"{self.name}.{branch}", draw)


class Transformer(nn.Module):
    """The part of the model that one stage holds, all of it without a pipeline; names are those of the whole model.

    While backward computes recomputed layers again (the first ones of a stage, or all), `again` is true.
    """

    def __init__(
        self, case: Case, strategy: Strategy, parts: Parts, dropout: Dropout, device: torch.device, stage: Stage
    ) -> None:
        super().__init__()
        self.case, self.ends, self.dropout = case, stage.last, dropout
        embeds = stage.first or (stage.last and case.embeds_behind)
        self.embedding = parts.embedding() if embeds else _tables(parts) if stage.copies_table else None
        layer = partial(_layer, case, strategy, parts, dropout, device)
        self.layers = nn.ModuleDict({str(index): layer(f"layers.{index}") for index in stage.layers})
        self.units = units(case, [int(layer) for layer in self.layers])
        self.saved_over, self.again = parts.saved_over, False
        if self.ends:
            self.final_norm = _norm(case, case.hidden, device)
            self.head = parts.head()
            self.behind_head = tuple(parts.behind_head)
            for leaf, make in parts.behind_head.items():
                self.add_module(leaf, make(layer))

    def forward(self, batch: Delivered, received: Tensor | None = None) -> Tensor:
        """This rank's logits, in the strategy's layout: whole, a part of the vocabulary, or a part of the sequence.

        A stage takes the hidden states `received` from the stage before, and returns those for the next.
        """
        x = received
        if x is None:
            assert self.embedding is not None
            x = self.embedding(batch.tokens, batch.positions)
            x = self.dropout.hidden(x, "embedding", batch.draw)
        table = self.rotary(batch, x.dtype)
        early_stop, contexts = self.case.early_stop, self.contexts
        for unit in self.units if torch.is_grad_enabled() else ():
            through = partial(self._through, unit, table, batch.attention_mask, batch.draw)
            x = checkpoint_unit(through, x, early_stop=early_stop, distribute=self.saved_over, contexts=contexts)
        held = [int(layer) for layer in self.layers]
        rest = held[sum(map(len, self.units)) :] if torch.is_grad_enabled() else held
        x = self._through(rest, table, batch.attention_mask, batch.draw, x)
        if not self.ends:
            return x
        x = self.final_norm(x)
        logits = self.logits(x)
        for leaf in self.behind_head:
            logits = self.get_submodule(leaf)(logits, x, batch, self)
        return logits

    def logits(self, x: Tensor) -> Tensor:
        """The head's logits of normed hidden states."""
        tables = self.head if self.embedding is None else self.embedding.get_submodule("tokens")
        tied = tables.weight  # a gathered table is no parameter
        logits: Tensor = self.head(x, tied)
        return logits

    def rotary(self, batch: Delivered, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        """The table of rotary positions of a micro-batch; None if there are none."""
        rotary = self.case.positions == "rope"
        return rotary_table(batch.positions, self.case.rotated_dim, dtype) if rotary else None

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """The contexts of forward and of its repetition in backward."""
        forward, repeated = self.dropout.contexts()
        return forward, self._computing_again(repeated)

    @contextmanager
    def _computing_again(self, inner: AbstractContextManager[None]) -> Iterator[None]:
        self.again = True
        try:
            with inner:
                yield
        finally:
            self.again = False

    def _through(
        self,
        layers: Sequence[int],
        table: tuple[Tensor, Tensor] | None,
        hidden_B1SS: Tensor | None,
        draw: Draw,
        x: Tensor,
    ) -> Tensor:
        """Hidden states after these layers."""
        for layer in layers:
            x = self.layers[str(layer)](x, table, hidden_B1SS, draw)
        return x


def _layer(case: Case, strategy: Strategy, parts: Parts, dropout: Dropout, device: torch.device, name: str) -> Layer:
    replaced = case.replaced_branches(case.blocks[name])

    def branch(leaf: str, plain: Callable[[], nn.Module]) -> nn.Module:
        feature = replaced.get(leaf)
        return parts.branches[feature](f"{name}.{leaf}", dropout) if feature else plain()

    # Attention first: `parallel.layers.prefetch` takes the order of construction for the order of forward.
    attention = branch("attention", lambda: _attention(case, strategy, parts, dropout, device, name))
    mlp = branch(
        "mlp", lambda: Mlp(case.activation, {leaf: parts.linear(f"{name}.mlp.{leaf}") for leaf in mlp_linears(case)})
    )
    behind = {leaf: module() for leaf, module in parts.behind_layer.items()}
    norms = (_norm(case, case.hidden, device) for _ in range(2))
    return Layer(next(norms), attention, next(norms), mlp, name, dropout, behind)


def _attention(
    case: Case, strategy: Strategy, parts: Parts, dropout: Dropout, device: torch.device, name: str
) -> Attention:
    heads = HeadShape(
        group=case.heads // case.kv_heads,
        dim=case.head_dim,
        sequence_dim=strategy.sequence_dim,
        recompute_core=case.core_again,
    )
    return Attention(
        heads,
        parts.core,
        parts.exchange,
        {leaf: parts.linear(f"{name}.attention.{leaf}") for leaf in attention_linears(case)},
        {leaf: _norm(case, case.head_dim, device) for leaf in head_norms(case)},
        name,
        dropout,
    )


def _tables(parts: Parts) -> nn.Module:
    """The token table for a tied head on a stage that runs no embedding."""
    held = nn.Module()
    held.tokens = parts.embedding().get_submodule("tokens")
    return held


def _norm(case: Case, width: int, device: torch.device) -> Norm:
    return Norm(width, bias=case.norm == "layernorm", dtype=dtype_of(case), device=device)
