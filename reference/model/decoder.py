"""The dense decoder of every family: a pure function from full weights and a batch to logits.

Pre-norm residual blocks, x += attention(norm(x)); x += mlp(norm(x)). The case's words alone decide (norm, activation,
bias, positions, tied, qk_norm, fuse_qkv, fuse_mlp); a family only sets their defaults. Sources: GPT-2 (Radford et al.
2019), InternLM2 (arXiv:2403.17297), OPT (arXiv:2205.01068), Llama (arXiv:2302.13971).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from shardproof.reference.case import Case
from shardproof.reference.data.batches import Batch
from shardproof.reference.model import layers
from shardproof.reference.model.branch import Beside, branch_of
from shardproof.reference.model.losses import wide
from shardproof.reference.model.randomness import SHARES, mask, rate_of

Tap = Callable[[str, Tensor], None]
"""Called with every module's dotted name and output tensor, in the order of the forward pass."""


def _rotate(what: str, x_BSND: Tensor, positions_BS: Tensor) -> Tensor:
    return layers.rotate(x_BSND, positions_BS)


def _join(branch: str, x_BSH: Tensor, y_BSH: Tensor) -> Tensor:
    return x_BSH + y_BSH


@dataclass(frozen=True, kw_only=True, slots=True)
class Arithmetic:
    """The mathematics of a training step as functions. The control run replaces some, by sums in other orders.

    `rotate` turns what its first argument names, "q" or "k". `join` adds to its input the output of the branch that its
    first argument names, "attention" or "mlp".
    """

    look_up: Callable[[Tensor, Tensor], Tensor] = layers.look_up
    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor] = layers.linear
    norm: Callable[[Tensor, Tensor, Tensor | None], Tensor] = layers.norm
    attention: Callable[..., Tensor] = layers.attention
    activate: Callable[[str, Tensor, Tensor | None], Tensor] = layers.activate
    weigh: Callable[[Tensor, Tensor], Tensor] = layers.weigh
    rotate: Callable[[str, Tensor, Tensor], Tensor] = _rotate
    join: Callable[[str, Tensor, Tensor], Tensor] = _join
    squares: Callable[[Tensor], Tensor] = layers.squares


PLAIN = Arithmetic()


def silent(module: str, output: Tensor) -> None:
    """A tap that does nothing."""


def logits(
    case: Case,
    weights: Mapping[str, Tensor],
    batch: Batch,
    *,
    tap: Tap = silent,
    arithmetic: Arithmetic = PLAIN,
    beside: Beside | None = None,
) -> Tensor:
    """Logits [B, S, vocab] in the weights' dtype. The batch lies on the weights' device.

    `beside` receives the losses and counts of features' branches. Without `beside`, features behind the decoder are
    skipped.
    """
    run = Pass(case=case, weights=weights, batch=batch, tap=tap, arithmetic=arithmetic, beside=beside or Beside())
    visible_SS = layers.visible(batch.tokens.shape[1], batch.cu_seqlens, batch.tokens.device)
    x_BSH = run.embedding("embedding")
    for layer in range(case.layers):
        x_BSH = run.block(f"layers.{layer}", x_BSH, visible_SS)
    x_BSH = run.norm("final_norm", x_BSH)
    logits_BSV = run.head("head", x_BSH)
    for feature in getattr(case, "behind_decoder", ()) if beside else ():
        branch_of(feature).forward(run, "", x_BSH, visible_SS)
    return logits_BSV


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """A forward pass: each method is one module and gets its dotted name."""

    case: Case
    weights: Mapping[str, Tensor]
    batch: Batch
    tap: Tap
    arithmetic: Arithmetic
    beside: Beside

    def embedding(self, name: str) -> Tensor:
        """Hidden states of the micro-batch's tokens."""
        x_BSH = self.arithmetic.look_up(self.weights[f"{name}.tokens.weight"], self.batch.tokens)
        if self.case.positions == "learned":
            table_SH = self.weights[f"{name}.positions.weight"]
            x_BSH = x_BSH + self.arithmetic.look_up(table_SH, self.batch.positions)
        return self.apply_dropout(name, self.tap_output(name, x_BSH))

    def block(self, name: str, x_BSH: Tensor, visible_SS: Tensor) -> Tensor:
        """Hidden states after the transformer layer of this name."""
        replaced = getattr(self.case, "replaced_branches", None)
        others = replaced(self.case.blocks[name]) if replaced else {}  # a case of plain words has no features
        for branch, plain in (("attention", self.attention), ("mlp", self.mlp)):
            y_BSH = self.norm(f"{name}.{branch}_norm", x_BSH)
            if branch in others:
                y_BSH = self.tap_output(
                    f"{name}.{branch}", branch_of(others[branch]).forward(self, name, y_BSH, visible_SS)
                )
            else:
                y_BSH = plain(f"{name}.{branch}", y_BSH, visible_SS)
            x_BSH = self.arithmetic.join(branch, x_BSH, self.apply_dropout(f"{name}.{branch}", y_BSH))
        behind = getattr(self.case, "behind_layer", None)
        return self.tap_output(name, behind(x_BSH, lambda leaf: self.weights[f"{name}.{leaf}"]) if behind else x_BSH)

    def attention(self, name: str, x_BSH: Tensor, visible_SS: Tensor) -> Tensor:
        """The plain attention of normed hidden states."""
        heads, kv_heads = self.case.heads, self.case.kv_heads
        if self.case.fuse_qkv:
            q_BSND, k_BSKD, v_BSKD = layers.split_qkv(self.linear(f"{name}.wqkv", x_BSH), heads, kv_heads)
        else:
            q_BSND = self.linear(f"{name}.wq", x_BSH).unflatten(-1, (heads, -1))
            k_BSKD = self.linear(f"{name}.wk", x_BSH).unflatten(-1, (kv_heads, -1))
            v_BSKD = self.linear(f"{name}.wv", x_BSH).unflatten(-1, (kv_heads, -1))
        if self.case.qk_norm:
            q_BSND, k_BSKD = self.norm(f"{name}.q_norm", q_BSND), self.norm(f"{name}.k_norm", k_BSKD)
        if self.case.positions == "rope":
            q_BSND = self.arithmetic.rotate("q", q_BSND, self.batch.positions)
            k_BSKD = self.arithmetic.rotate("k", k_BSKD, self.batch.positions)
        context_BSE = self.core(name, q_BSND, k_BSKD, v_BSKD, visible_SS)
        return self.tap_output(name, self.linear(f"{name}.wo", context_BSE))

    def core(self, name: str, q_BSND: Tensor, k_BSKD: Tensor, v_BSKE: Tensor, visible_SS: Tensor) -> Tensor:
        """Attention of these queries, keys and values, [B, S, N*E], with the dropout of its shares."""
        kept_BNSS, rate = mask(self.case, self.batch, f"{name}.{SHARES}"), self.case.attention_dropout
        factors = () if kept_BNSS is None else (kept_BNSS.to(wide(q_BSND.dtype)) / (1 - rate),)
        return self.arithmetic.attention(q_BSND, k_BSKD, v_BSKE, visible_SS, *factors)

    def mlp(self, name: str, x_BSH: Tensor, _visible_SS: Tensor) -> Tensor:
        """The plain MLP of normed hidden states."""
        kind = self.case.activation
        if self.case.fuse_mlp:
            gate_BSF, up_BSF = self.linear(f"{name}.w13", x_BSH).chunk(2, -1)
            y_BSF = self.arithmetic.activate(kind, up_BSF, gate_BSF)
        elif kind == "swiglu":
            gate_BSF = self.linear(f"{name}.w1", x_BSH)
            y_BSF = self.arithmetic.activate(kind, self.linear(f"{name}.w3", x_BSH), gate_BSF)
        else:
            y_BSF = self.arithmetic.activate(kind, self.linear(f"{name}.w1", x_BSH), None)
        return self.tap_output(name, self.linear(f"{name}.w2", y_BSF))

    def head(self, name: str, x_BSH: Tensor) -> Tensor:
        """Logits of the decoder's normed hidden states."""
        weight = self.weights["embedding.tokens.weight" if self.case.tied else f"{name}.weight"]
        return self.tap_output(name, self.arithmetic.linear(x_BSH, weight, None))

    def linear(self, name: str, x: Tensor) -> Tensor:
        """A linear with a bias where there is one."""
        weight, bias = self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias")
        return self.tap_output(name, self.arithmetic.linear(x, weight, bias))

    def norm(self, name: str, x: Tensor) -> Tensor:
        """A norm over the last dim, with a bias where there is one."""
        weight, bias = self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias")
        return self.tap_output(name, self.arithmetic.norm(x, weight, bias))

    def apply_dropout(self, site: str, x_BSH: Tensor) -> Tensor:
        """Hidden states with the dropout of this site."""
        kept_BSH = mask(self.case, self.batch, site)
        return x_BSH if kept_BSH is None else x_BSH * kept_BSH / (1 - rate_of(self.case, site))

    def tap_output(self, name: str, output: Tensor) -> Tensor:
        """Call the tap with a module's output; return it."""
        self.tap(name, output)
        return output
