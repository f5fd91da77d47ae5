"""Randomness: dropout, where its masks come from, and who draws the initial values. Words and what makes them legal."""

from collections.abc import Iterator

from shardproof.reference.language.core import Core
from shardproof.reference.language.words import Problem, word


class Randomness(Core):
    """A case with dropout or drawn weights; by default without dropout, weights by the seed and their names."""

    dropout: float = word(
        0.0,
        "share of hidden states dropped: embedding, attention, MLP",
        legal="in [0, 1)",
        domain=(0.0, 0.1),
        after="clip",
    )
    attention_dropout: float = word(
        0.0, "share of attention probabilities that is dropped", legal="in [0, 1)", domain=(0.0, 0.1)
    )
    random: str = word(
        "field",
        "masks are a function of step, sample, site and place, or draws of Megatron's streams",
        legal=("field", "stateful"),
    )
    init: str = word(
        "whole",
        "initial values: this project's, Megatron's by place, or Megatron's drawn by each rank",
        legal=("whole", "field", "shard"),
    )

    def problems(self) -> Iterator[Problem]:
        """Every broken rule: its word, the rule and a legal value."""
        for key in ("dropout", "attention_dropout"):
            if not 0 <= getattr(self, key) < 1:
                yield key, "must lie in [0, 1)", f"{key}=0.1"
        if self.random != "field" and not (self.dropout or self.attention_dropout):
            yield "random", "is where masks come from, and without dropout there are none", "random=field"
        if self.init != "whole" and self.load:
            yield "init", "is about values at the beginning, and load= brings those of a checkpoint", "init=whole"
        if self.init == "shard" and self.mode == "autotp":
            yield "init", "ranks draw no shards in mode=autotp: AutoTP cuts weights that it loads", "init=field"
        if self.init == "shard" and self.table_is_copied:
            yield "init", "draws on each stage by itself, and two stages hold the token table", "init=field"
