"""Rows of data: one for each sequence, or several sequences packed into one row; and how a batch reaches the ranks.

Sources: InternEvo's packed datasets; Megatron-Core `broadcast_data`, which knows no packs (modes.md 2.6, 3.6).
"""

from collections.abc import Iterator, Mapping
from typing import Any

from shardproof.reference.language.core import Core, mode_of
from shardproof.reference.language.words import Problem, word


def _delivery(v: Mapping[str, Any]) -> str:
    return "tensors" if mode_of(v).broadcasts and not v["packed"] else "local"


class Packing(Core):
    """A case whose rows may hold several sequences."""

    packed: bool = word(False, "sequences packed into one row, with borders (InternEvo)", after="micro")
    delivery: str = word(
        "tensors",
        "how a batch reaches the ranks: one broadcast for each tensor, two for all, or read by every rank",
        legal=("tensors", "flat", "local"),
        after="data",
        follows=("mode", "packed"),
        value=_delivery,
        dense="local",
    )
    attention_mask: bool = word(True, "the attention mask is broadcast too (delivery=tensors or flat)", dense=True)

    @property
    def rows(self) -> int:
        """The number of rows of a micro-batch on a data rank."""
        return 1 if self.packed else self.batch

    @property
    def row_tokens(self) -> int:
        """Tokens of a row, on all of its ranks."""
        return self.tokens if self.packed else self.seq

    @property
    def full_rows(self) -> bool:
        """Whether every row is text from end to end, as those of Megatron's models are, unpacked."""
        return not self.packed and self.family not in ("internlm2", "llama")

    def problems(self) -> Iterator[Problem]:
        """Every broken rule: its word, the rule and a legal value."""
        if self.packed and self.delivery != "local":
            yield "delivery", "Megatron's broadcasts know no packs", "delivery=local"
        if self.packed and self.positions == "learned":
            yield "packed", "packs restart positions inside a row, which needs rotary positions", "positions=rope"
