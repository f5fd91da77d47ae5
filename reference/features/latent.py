"""Latent attention: keys and values of all heads are projected from one short vector a token. Its words and rules.

Lq, Lk = q_lora_rank, kv_lora_rank; n heads. Each head has dn + dr = qk_head_dim + qk_rope_dim features of a query and a
key and dv = v_head_dim of a value. The dr rotary features of a key are one vector for all heads. Biases, norms and the
rotary pairs (i, i + dr/2) are those of the case. Sources: DeepSeek-V2 (arXiv:2405.04434) 2.1; Megatron-Core 0.16.1
`MLASelfAttention` (experts.md 23). Its local spec splits the down projections, and its Transformer-Engine spec repeats
them on every rank.
"""

from collections.abc import Iterator

from shardproof.reference.language.core import Core
from shardproof.reference.language.words import Problem, multiple, not_default, word


class Latent(Core):
    """A case whose attention may be latent."""

    kv_lora_rank: int = word(
        0,
        "features of the latent of keys and values (multi-head latent attention); 0: none",
        legal="0, or at least 1",
        domain=(0, 22),
        after="qk_norm",
        part=True,
    )
    q_lora_rank: int = word(
        0, "features of the latent of queries (kv_lora_rank above 0); 0: none", legal="0, or at least 1", domain=(0, 26)
    )
    qk_head_dim: int = word(8, "features of a query and key that positions leave alone (kv_lora_rank)", domain=(8, 5))
    qk_rope_dim: int = word(4, "features of a query and key that positions turn (kv_lora_rank)", domain=(4, 2))
    v_head_dim: int = word(8, "features of a value (kv_lora_rank)", domain=(8, 7))
    latent_down: str = word(
        "duplicated",
        "projections to latents are whole on every rank, or columns that are gathered (kv_lora_rank)",
        legal=("duplicated", "column"),
        dense="duplicated",
    )

    def replaced_branches(self, layer: int) -> dict[str, str]:
        """The replaced branches of a layer; latent attention replaces attention."""
        return super().replaced_branches(layer) | ({"attention": "latent"} if self.kv_lora_rank else {})

    @property
    def head_dim(self) -> int:
        """Features of a query or a key, with its rotary ones."""
        return self.qk_head_dim + self.qk_rope_dim if self.kv_lora_rank else super().head_dim

    @property
    def value_dim(self) -> int:
        """Features of a value."""
        return self.v_head_dim if self.kv_lora_rank else super().value_dim

    @property
    def rotated_dim(self) -> int:
        """Features that rotary positions turn."""
        return self.qk_rope_dim if self.kv_lora_rank else super().rotated_dim

    def problems(self) -> Iterator[Problem]:
        """Every broken rule: its word, the rule and a legal value."""
        for key in ("kv_lora_rank", "q_lora_rank"):
            if getattr(self, key) < 0:
                yield key, "must not be negative", f"{key}=0"
        if not self.kv_lora_rank:
            for key, legal in not_default(Latent, self):
                yield key, "is about latent attention, and kv_lora_rank=0 has none", legal
            return
        if self.system.system != "Megatron-Core":
            yield "kv_lora_rank", f"mode={self.mode} has no latent attention (mode=tp|tp-sp)", "kv_lora_rank=0"
        if self.positions != "rope":
            yield "positions", "latent attention has rotary keys beside its latent", "positions=rope"
        if self.qk_rope_dim % 2:
            yield "qk_rope_dim", "rope rotates pairs", f"qk_rope_dim={self.qk_rope_dim + 1}"
        if self.kv_heads != self.heads:
            rule = f"latent attention has a key and a value for each of heads={self.heads}"
            yield "kv_heads", rule, f"kv_heads={self.heads}"
        if self.qk_norm:
            yield "qk_norm", "is of each head, and latent attention has norms of its latents", "qk_norm=false"
        if self.value_dim > self.head_dim and self.mesh.get("cp", 1) > 1:
            rule = f"must be at most {self.head_dim}, as wide as the key that context ranks exchange with it"
            yield "v_head_dim", rule, f"v_head_dim={self.head_dim}"
        if self.latent_down == "column":
            yield from self._columns()

    def _columns(self) -> Iterator[Problem]:
        """The rules of down projections that are split into columns."""
        tp, joined = self.tp, self.kv_lora_rank + self.qk_rope_dim
        if self.q_lora_rank % tp:
            legal = f"q_lora_rank={multiple(self.q_lora_rank, tp)}"
            yield "q_lora_rank", f"must be a multiple of tp={tp} (latent_down=column)", legal
        if joined % tp:
            rule = f"with qk_rope_dim={self.qk_rope_dim} must be a multiple of tp={tp} (latent_down=column)"
            yield "kv_lora_rank", rule, f"kv_lora_rank={multiple(joined, tp) - self.qk_rope_dim}"
