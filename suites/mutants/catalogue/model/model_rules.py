"""What a module computes by another rule than the dense model's: attention, positions, norms, sums (bugs.md 6b, 6e)."""

from __future__ import annotations

from suites.mutants.mutant import TENSOR, Change, Mutant, everywhere

__all__ = ["MODEL_RULES"]

_CORE = "functional.scaled_dot_product_attention(q, k, v, attn_mask=visible, is_causal=visible is None)"
_HALVES = "first, second = x_BSND.to(cos.dtype).chunk(2, -1)"
_TURNED = "return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x_BSND.dtype)"
_ATTEND = 'x = x + self._dropped("attention", self.attention(self.attention_norm(x), table, hidden_B1SS, draw), draw)'
_FEED = 'y: Tensor = x + self._dropped("mlp", self.mlp(self.mlp_norm(x)), draw)'
_LAYER_NORM = "functional.layer_norm(x.to(exact), width, weight, self.bias.to(exact), EPSILON)"
_LEAVE = "return pairs.reduce_from(y, self.axis)"
_LEAVE_SPLIT = "return pairs.reduce_scatter_to_sequence(y, self.axis, dim=self.sequence_dim)"
_ATTENTION = "layers.0.attention*"
_VOCABULARY_ROWS = "functional.embedding(local.masked_fill(outside, 0), weight).masked_fill(outside[..., None], 0)"
_GATHERED = "self._from_whole(pairs.gather_from(columns, self.region.axis), positions_BS)"
_WHOLE = "self._from_whole(functional.embedding(tokens_BS, self.tokens.weight), positions_BS)"
_LEARNED = everywhere("positions=learned")
_FIRST_SUM = "embedding|layers.0.attention.wo"


def _change(module: str, old: str, new: str) -> Change:
    return Change(module=f"parallel.{module}", old=old, new=new)


def _looked_up(places: str) -> tuple[Change, ...]:
    """The learned positions of all tables, looked up at these places."""
    return (
        _change(
            "layers.embedding",
            "functional.embedding(positions_BS, self.positions.weight)",
            places.format("positions_BS"),
        ),
        _change(
            "weights.tables",
            "functional.embedding(positions_Bs, self.positions.weight)",
            places.format("positions_Bs"),
        ),
    )


def _scaled_sum(by: str) -> tuple[Change, ...]:
    """The output of every row linear, times this, before it is summed."""
    return (
        _change("layers.linear", _LEAVE, _LEAVE.replace("(y,", f"(y * ({by}),")),
        _change("layers.linear", _LEAVE_SPLIT, _LEAVE_SPLIT.replace("(y,", f"(y * ({by}),")),
    )


MODEL_RULES = (
    Mutant(
        name="scores-divided-by-the-width-of-a-head",
        stands_for="scores over the head's width and not its root (muP's rule) where the other is meant",
        modes=everywhere(),
        changes=(_change("layers.attention", _CORE, _CORE[:-1] + ", scale=1 / q.shape[-1])"),),
        kills="activations",
        phase="forward",
        region=_ATTENTION,
        cause="scores_scaled",
    ),
    Mutant(
        name="causality-left-to-a-mask-that-is-none",
        stands_for="a mask that is handed over where causality was implied (is_causal left out)",
        modes=everywhere(),
        condition="packed=false",
        changes=(_change("layers.attention", _CORE, "functional.scaled_dot_product_attention(q, k, v)"),),
        kills="activations",
        phase="forward",
        region=_ATTENTION,
        cause="later_seen",
    ),
    Mutant(
        name="rotary-pairs-that-are-neighbours",
        stands_for="Llama's two layouts: pairs (2i, 2i + 1) of the original, (i, i + D/2) of Hugging Face",
        modes=everywhere(),
        condition="positions=rope",
        changes=(
            _change(
                "layers.attention", _HALVES, "first, second = x_BSND.to(cos.dtype).unflatten(-1, (-1, 2)).unbind(-1)"
            ),
            _change(
                "layers.attention",
                _TURNED,
                _TURNED.replace("torch.cat(", "torch.stack(").replace("-1).to", "-1).flatten(-2).to"),
            ),
        ),
        kills="activations",
        phase="forward",
        region=_ATTENTION,
        cause="rotated_otherwise",
    ),
    Mutant(
        name="rotary-base-of-llama-3",
        stands_for="rope_theta 500000 of Llama 3 where 10000 is meant",
        modes=everywhere(),
        condition="positions=rope",
        changes=(_change("layers.attention", "_ROTARY_BASE = 10000.0", "_ROTARY_BASE = 500000.0"),),
        kills="activations",
        phase="forward",
        region=_ATTENTION,
        cause="rotated_otherwise",
    ),
    Mutant(
        name="learned-positions-counted-from-one",
        stands_for="fairseq and OPT: positions that are counted from the padding index on",
        modes=_LEARNED,
        changes=_looked_up(
            "functional.embedding(({0} + 1).clamp(max=len(self.positions.weight) - 1), self.positions.weight)"
        ),
        kills="activations",
        phase="data|forward",
        region="embedding",
        cause="positions_shifted",
    ),
    Mutant(
        name="learned-positions-without-their-sum",
        stands_for="B-109: InternEvo 77c3b46's kin: what a caller expects in place is returned and dropped",
        modes=_LEARNED,
        changes=_looked_up("0 * functional.embedding({0}, self.positions.weight)"),
        kills="activations",
        phase="data|forward",
        region="embedding",
        cause="positions_missing|term_missing",
    ),
    Mutant(
        name="token-rows-times-the-root-of-the-width",
        stands_for="Vaswani et al. 2017, Gemma: token embeddings times the root of their width",
        modes=_LEARNED,
        changes=(
            _change("layers.embedding", _VOCABULARY_ROWS, f"{_VOCABULARY_ROWS} * weight.shape[-1] ** 0.5"),
            _change(
                "layers.embedding",
                _GATHERED,
                _GATHERED.replace(", positions", " * self.positions.weight.shape[-1] ** 0.5, positions"),
            ),
            _change(
                "layers.embedding", _WHOLE, _WHOLE.replace("weight)", "weight) * self.tokens.weight.shape[-1] ** 0.5")
            ),
            _change(
                "weights.tables", "return x_BsD + functional", "return x_BsD * x_BsD.shape[-1] ** 0.5 + functional"
            ),
        ),
        kills="activations",
        phase="forward",
        region="embedding",
        cause="constant_factor",
    ),
    Mutant(
        name="hidden-states-replaced-by-attention",
        stands_for="ColossalAI's and Megatron's block rewrites: a residual that a fused path was to add",
        modes=everywhere(),
        changes=(_change("model.transformer", _ATTEND, _ATTEND.replace("x + ", "")),),
        kills="activations",
        phase="forward",
        region="layers.0*",
        cause="term_missing",
    ),
    Mutant(
        name="hidden-states-replaced-by-the-mlp",
        stands_for="the same behind the MLP",
        modes=everywhere(),
        changes=(_change("model.transformer", _FEED, _FEED.replace("x + ", "")),),
        kills="activations",
        phase="forward",
        region="layers.0*",
        cause="term_missing",
    ),
    Mutant(
        name="mlp-branch-that-gets-no-gradient",
        stands_for="transformers #48687, a detach that stays: the loss is right, the gradient of a branch is lost",
        modes=everywhere(),
        changes=(_change("model.transformer", _FEED, _FEED.replace("mlp_norm(x)", "mlp_norm(x.detach())")),),
        kills="activation_gradients",
        phase="backward",
        region="layers.*",
        cause="term_missing",
    ),
    Mutant(
        name="skip-path-that-gets-no-gradient",
        stands_for="the same on the other path",
        modes=everywhere(),
        changes=(_change("model.transformer", _FEED, _FEED.replace("x + ", "x.detach() + ")),),
        kills="activation_gradients",
        phase="backward",
        region="layers.*",
        cause="term_missing",
    ),
    Mutant(
        name="gelu-that-is-not-approximated",
        stands_for="GELU by erf where GPT-2's tanh is meant (Hugging Face gelu and gelu_new)",
        modes=everywhere(),
        condition="activation=gelu",
        changes=(_change("layers.mlp", 'approximate="tanh"', 'approximate="none"'),),
        kills="activations",
        phase="forward",
        region="layers.0.mlp*",
        cause="other_activation",
    ),
    Mutant(
        name="norms-with-the-epsilon-of-llama",
        stands_for="1e-6 of Llama where 1e-5 is meant",
        modes=everywhere(),
        changes=(_change("layers.norm", "EPSILON = 1e-5", "EPSILON = 1e-6"),),
        kills="activations",
        phase="forward",
        region="layers.0.attention_norm",
        cause="other_epsilon",
    ),
    Mutant(
        name="layer-norm-whose-mean-stays",
        stands_for="RMSNorm where LayerNorm is meant, the bias kept",
        modes=everywhere(),
        condition="norm=layernorm",
        changes=(
            _change(
                "layers.norm",
                _LAYER_NORM,
                "(functional.rms_norm(x.to(exact), width, weight, EPSILON) + self.bias.to(exact))",
            ),
        ),
        kills="activations",
        phase="forward",
        region="layers.0.attention_norm",
        cause="normed_otherwise",
    ),
    Mutant(
        name="kv-heads-repeated-one-after-the-other",
        stands_for="B-63, B-53: repeat where repeat_interleave is meant: a query reads another group's keys",
        modes=everywhere("kv_heads>tp", TENSOR) | {"isp": "kv_heads>tp"},
        condition="heads>kv_heads",
        changes=(
            _change(
                "layers.attention",
                "k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)",
                "k.repeat(1, group, 1, 1), v.repeat(1, group, 1, 1)",
            ),
        ),
        kills="activations",
        phase="forward",
        region=_ATTENTION,
        cause="kv_order",
    ),
    Mutant(
        name="row-output-divided-by-the-group-size",
        stands_for="B-41's kin: a mean where the partial sums of a row linear are summed",
        modes=everywhere("", TENSOR),
        changes=_scaled_sum("1 / self.axis.size"),
        kills="activations",
        phase="forward",
        region=_FIRST_SUM,
        cause="averaged",
    ),
    Mutant(
        name="row-output-times-one-half",
        stands_for="a scale of residual branches that one of two implementations has",
        modes=everywhere("", TENSOR),
        changes=_scaled_sum("0.5"),
        kills="activations",
        phase="forward",
        region=_FIRST_SUM,
        cause="constant_factor",
    ),
)
