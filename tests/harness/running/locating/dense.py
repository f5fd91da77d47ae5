"""A dense decoder of nn.Modules, and what it learns in one step: the truth of the hand-written and the DTensor subject.

Letters: B sequences, S tokens, H hidden, N heads, D head dim. Every data rank has `case.micro` micro-batches of
`case.batch` sequences; the truth computes all of them at once.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardproof.harness.running.trials.trial import Reference
from shardproof.reference.case import Case


class Norm(nn.Module):
    """Root mean square norm with a weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """[.., H] to [.., H]."""
        return self.weight * x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


class Attention(nn.Module):
    """Causal attention with as many heads as fit into the width of its projections."""

    def __init__(self, width: int, head: int) -> None:
        super().__init__()
        self.head = head
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, H] to [B, S, H]."""
        q, k, v = (part.unflatten(-1, (-1, self.head)).transpose(1, 2) for part in (self.q(x), self.k(x), self.v(x)))
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        y: Tensor = self.o(seen.transpose(1, 2).flatten(2))
        return y


class Mlp(nn.Module):
    """Two linear maps and a gelu."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, H] to [B, S, H]."""
        y: Tensor = self.down(functional.gelu(self.up(x)))
        return y


class Block(nn.Module):
    """Attention and MLP, each behind its norm and added to the hidden states."""

    def __init__(self, width: int, inner: int, head: int) -> None:
        super().__init__()
        self.norm1, self.attention = Norm(width), Attention(width, head)
        self.norm2, self.mlp = Norm(width), Mlp(width, inner)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, H] to [B, S, H]."""
        x = x + self.attention(self.norm1(x))
        y: Tensor = x + self.mlp(self.norm2(x))
        return y


class Decoder(nn.Module):
    """Embedding, blocks, norm and head."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.embedding = nn.Embedding(case.vocab, case.hidden)
        self.layers = nn.ModuleList(Block(case.hidden, case.ffn, case.head_dim) for _ in range(case.layers))
        self.final_norm = Norm(case.hidden)
        self.head = nn.Linear(case.hidden, case.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, S] tokens to [B, S, vocab] logits."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        y: Tensor = self.head(self.final_norm(x))
        return y


def weights(case: Case) -> dict[str, Tensor]:
    """All weights in float64, from the seed alone; no bias or norm is 0 or 1."""
    with torch.device("meta"):
        shapes = {name: tuple(p.shape) for name, p in Decoder(case).named_parameters()}
    drawn = torch.Generator().manual_seed(case.seed)
    found = {}
    for name, shape in shapes.items():
        value = torch.randn(shape, generator=drawn, dtype=torch.float64)
        found[name] = 1 + 0.3 * value if "norm" in name else 0.4 * value
    return found


def rows(case: Case, data_rank: int, micro: int) -> Tensor:
    """The tokens of one micro-batch with one more each, [B, S + 1]."""
    drawn = torch.Generator().manual_seed(1000 * case.seed + 10 * data_rank + micro + 1)
    return torch.randint(case.vocab, (case.batch, case.seq + 1), generator=drawn)


def truth(case: Case, device: torch.device) -> Mapping[str, Tensor]:
    """Loss, logits and gradients of one step over all rows."""
    model = Decoder(case).double()
    model.load_state_dict(weights(case))
    tokens = torch.cat([rows(case, rank, micro) for rank in range(case.dp) for micro in range(case.micro)])
    logits = model(tokens[:, :-1])
    loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    gradients = {f"grad/{name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss/0": loss.detach(), "logits/0": logits.detach(), **gradients}


def control(case: Case, device: torch.device, *, parts: int = 0) -> Mapping[str, Tensor]:
    """The truth. It needs no wider dtype, since the cases here are in float64."""
    return truth(case, device)


REFERENCE = Reference(truth=truth, control=control)
