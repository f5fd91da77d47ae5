"""Held back: bugs inside a layer (attention, MLP, norms, residuals), none of which talks to another rank."""

from __future__ import annotations

from suites.mutants.mutant import Change, Mutant, everywhere

__all__ = ["MUTANTS"]

_ATTEND = 'x = x + self._dropped("attention", self.attention(self.attention_norm(x), table, hidden_B1SS, draw), draw)'
_FEED = 'y: Tensor = x + self._dropped("mlp", self.mlp(self.mlp_norm(x)), draw)'
_ATTENTION = "layers.0.attention|layers.0.attention.*"
_CORE = "context = functional.scaled_dot_product_attention(q, k, v, attn_mask=visible, is_causal=visible is None)"


def _attention(old: str, new: str) -> tuple[Change, ...]:
    return (Change(module="parallel.layers.attention", old=old, new=new),)


MUTANTS = (
    Mutant(
        name="rotary-turns-the-other-way",
        stands_for="sign of the rotation exchanged (Hugging Face #25199, converted rotary checkpoints)",
        modes=everywhere(),
        condition="positions=rope",
        changes=_attention(
            "(first * cos - second * sin, second * cos + first * sin)",
            "(first * cos + second * sin, second * cos - first * sin)",
        ),
        kills="activations|forward",
        phase="forward",
        region=_ATTENTION,
        cause="rotated_otherwise",
    ),
    Mutant(
        name="rotary-of-neighbouring-features",
        stands_for="GPT-NeoX and GPT-J pair other features (interleaved against half-rotated), mixed up",
        modes=everywhere(),
        condition="positions=rope",
        changes=_attention(
            "first, second = x_BSND.to(cos.dtype).chunk(2, -1)",
            "first, second = x_BSND.to(cos.dtype)[..., ::2], x_BSND.to(cos.dtype)[..., 1::2]",
        ),
        kills="activations|forward",
        phase="forward",
        region=_ATTENTION,
        cause="rotated_otherwise",
    ),
    Mutant(
        name="rotary-of-queries-alone",
        stands_for="InternEvo #123 in part: the keys' result is computed and not used",
        modes=everywhere(),
        condition="positions=rope",
        changes=_attention(
            "q, k = rotate(q, table), rotate(k, table)",
            "q = rotate(q, table)",
        ),
        kills="activations|forward",
        phase="forward",
        region=_ATTENTION,
        cause="rotated_otherwise",
    ),
    Mutant(
        name="rotary-base-of-another-model",
        stands_for="rope_theta of a configuration ignored (Llama 2 against Llama 3)",
        modes=everywhere(),
        condition="positions=rope",
        changes=_attention("_ROTARY_BASE = 10000.0", "_ROTARY_BASE = 500000.0"),
        kills="activations|forward",
        phase="forward",
        region=_ATTENTION,
        cause="rotated_otherwise",
    ),
    Mutant(
        name="rotary-angles-in-float32",
        stands_for="Hugging Face #29285: rotary angles in a low precision",
        modes=everywhere(),
        condition="positions=rope",
        changes=_attention(
            "dtype=torch.float64, device=positions_BS.device", "dtype=torch.float32, device=positions_BS.device"
        ),
        kills="activations|forward",
        phase="forward",
        region=_ATTENTION,
        cause="shorter_dtype",
    ),
    Mutant(
        name="scores-scaled-by-the-group",
        stands_for="softmax scale from the wrong head size (gpt-neox #1315)",
        modes=everywhere(),
        changes=_attention(_CORE, _CORE[:-1] + ", scale=1 / q.shape[-1])"),
        kills="activations|forward",
        phase="forward",
        region=_ATTENTION,
        cause="scores_scaled",
    ),
    Mutant(
        name="a-token-does-not-see-itself",
        stands_for="off by one in the causal mask: the first token sees nothing (NaN)",
        modes=everywhere("attention_mask=true delivery=tensors|flat", ("tp", "tp-sp")),
        changes=(
            Change(
                module="parallel.communication.batch",
                old="hidden = index[:, None] < index[None, :]",
                new="hidden = index[:, None] <= index[None, :]",
            ),
        ),
        kills="activations|forward",
        phase="forward",
        region=_ATTENTION,
        cause="nan",
    ),
    Mutant(
        name="tokens-see-the-future",
        stands_for="an attention mask that is handed over switches the causal one off (Hugging Face sdpa, is_causal)",
        modes=everywhere("attention_mask=true delivery=tensors|flat", ("tp", "tp-sp")),
        changes=(
            Change(
                module="parallel.communication.batch",
                old="hidden = index[:, None] < index[None, :]",
                new="hidden = torch.zeros(length, length, dtype=torch.bool, device=device)",
            ),
        ),
        kills="activations|forward",
        phase="forward",
        region=_ATTENTION,
        cause="later_seen",
    ),
    Mutant(
        name="gelu-of-the-other-kind",
        stands_for="exact GELU for the tanh approximation (Megatron openai_gelu, Hugging Face gelu_new)",
        modes=everywhere(),
        condition="activation=gelu",
        changes=(Change(module="parallel.layers.mlp", old='approximate="tanh"', new='approximate="none"'),),
        kills="activations|forward",
        phase="forward",
        region="layers.0.mlp|layers.0.mlp.*",
        cause="other_activation",
    ),
    Mutant(
        name="relu-squared",
        stands_for="squared ReLU (Primer, Nemotron) for ReLU",
        modes=everywhere(),
        condition="activation=relu",
        changes=(
            Change(
                module="parallel.layers.mlp",
                old="return functional.relu(first)",
                new="return functional.relu(first).square()",
            ),
        ),
        kills="activations|forward",
        phase="forward",
        region="layers.0.mlp|layers.0.mlp.*",
        cause="other_activation",
    ),
    Mutant(
        name="parallel-residual",
        stands_for="GPT-J's parallel residual: the MLP reads what attention reads",
        modes=everywhere(),
        changes=(
            Change(
                module="parallel.model.transformer",
                old=f"{_ATTEND}\n        {_FEED}",
                new=f"before = x\n        {_ATTEND}\n        {_FEED.replace('mlp_norm(x)', 'mlp_norm(before)')}",
            ),
        ),
        kills="activations|forward",
        phase="forward",
        region="layers.0.mlp_norm",
        cause="term_missing",
    ),
    Mutant(
        name="epsilon-of-another-norm",
        stands_for="norm epsilon 1e-6 for 1e-5 (Llama 1 and 2, InternLM)",
        modes=everywhere(),
        changes=(Change(module="parallel.layers.norm", old="EPSILON = 1e-5", new="EPSILON = 1e-6"),),
        kills="activations|forward",
        phase="forward",
        region="layers.0.attention_norm",
        cause="other_epsilon",
    ),
    Mutant(
        name="norm-weight-counts-from-one",
        stands_for="zero-centred norm weights (Gemma, Megatron layernorm_zero_centered_gamma) read as plain ones",
        modes=everywhere(),
        changes=(
            Change(
                module="parallel.layers.norm",
                old="width, weight = (x.shape[-1],), self.weight.to(exact)",
                new="width, weight = (x.shape[-1],), self.weight.to(exact) + 1",
            ),
        ),
        kills="activations|forward",
        phase="forward",
        region="layers.0.attention_norm",
        cause="normed_otherwise",
    ),
    Mutant(
        name="norm-without-its-bias",
        stands_for="a fallback norm kernel that is not handed the bias",
        modes=everywhere(),
        condition="norm=layernorm",
        changes=(
            Change(
                module="parallel.layers.norm",
                old="self.bias.to(exact), EPSILON",
                new="0 * self.bias.to(exact), EPSILON",
            ),
        ),
        kills="activations|forward",
        phase="forward",
        region="layers.0.attention_norm",
        cause="bias_missing",
    ),
)
"""Wrong mathematics of a layer: most have no tell-tale pattern, so the right cause is none."""
