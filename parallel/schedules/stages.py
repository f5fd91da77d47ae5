"""What a pipeline stage holds: consecutive layers, the embedding on the first, final norm, head and loss on the last.

Names are those of the whole model: stage 1 of two holds `layers.2`, not a `layers.0` of its own. With tied embeddings
the last stage holds a copy of the token table for its head, under the table's name.
Source: Megatron-Core `transformer_layer.py`: get_transformer_layer_offset, `parallel_state.py` (around.md 13.5).
"""

from __future__ import annotations

from dataclasses import dataclass

from reference.case import Case
from reference.groups import PipelineGroup

__all__ = ["Stage", "stage_of", "stages"]

_TABLE = "embedding.tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage of `count`: the numbers of its layers, and whether the last stage's head uses the token table."""

    index: int
    count: int
    layers: range
    tied: bool

    @property
    def first(self) -> bool:
        """Whether the model begins here."""
        return self.index == 0

    @property
    def last(self) -> bool:
        """Whether the model ends here."""
        return self.index == self.count - 1

    @property
    def copies_table(self) -> bool:
        """Whether its token table is a copy of the first stage's."""
        return self.last and not self.first and self.tied

    def holds(self, name: str) -> bool:
        """Whether the parameter or module of this dotted name is here."""
        first, number, *_ = [*name.split("."), ""]
        if first == "layers":
            return int(number) in self.layers
        if first == "embedding":
            return self.first or (self.copies_table and name.startswith(_TABLE))
        return self.last


def stage_of(case: Case, index: int) -> Stage:
    """The stage of this number, from 0."""
    pipeline = PipelineGroup(ranks=tuple(range(case.pp)))
    layers = pipeline.layers(case.layers, index, first=case.first_layers or None, last=case.last_layers or None)
    return Stage(index=index, count=case.pp, layers=layers, tied=case.tied)


def stages(case: Case) -> tuple[Stage, ...]:
    """All stages of a case, in order."""
    return tuple(stage_of(case, index) for index in range(case.pp))
