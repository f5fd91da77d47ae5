"""What a pipeline stage holds: consecutive layers, the embedding on the first, final norm, head and loss on the last.

A rank holds one stage, or one for each of its chunks: stage k*pp + r is chunk k of rank r. Names are those of the whole
model: stage 1 of two holds `layers.2`, not a `layers.0` of its own. With tied embeddings the last stage holds a copy of
the token table for its head, under the table's name. Without a pipeline the one stage is the whole model.
Source: Megatron-Core `transformer_layer.py`: get_transformer_layer_offset, `parallel_state.py` (around.md 13.5).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from parallel.schedules.pipeline import Pipeline
from reference.case import Case
from reference.groups import PipelineGroup

__all__ = ["TABLE", "Stage", "held", "pipeline_of", "stages"]

TABLE = "embedding.tokens.weight"
"""The parameter that the first and the last stage hold when embeddings are tied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage of `count` on `pp` ranks: the numbers of its layers, and whether the head uses the token table."""

    index: int
    count: int
    pp: int
    layers: range
    tied: bool

    @property
    def at(self) -> Mapping[str, int]:
        """Its rank's place on the mesh, as a term has it; nothing where there is one stage."""
        return {"pp": self.index % self.pp} if self.pp > 1 else {}

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

    @property
    def shares_table(self) -> bool:
        """Whether its token table is that of another stage too."""
        return self.copies_table or (self.first and not self.last and self.tied)

    def holds(self, name: str) -> bool:
        """Whether the parameter or module of this dotted name is here."""
        first, number, *_ = [*name.split("."), ""]
        if first == "layers":
            return int(number) in self.layers
        if first == "embedding":
            return self.first or (self.copies_table and name.startswith(TABLE.removesuffix(".weight")))
        return self.last


def stages(case: Case) -> tuple[Stage, ...]:
    """All stages of a case, in the order in which a micro-batch passes them."""
    return tuple(_stage(case, rank, chunk) for chunk in range(case.chunks) for rank in range(case.pp))


def held(case: Case, rank: int) -> tuple[Stage, ...]:
    """The stages of the rank at this place of a pipeline, chunk by chunk."""
    return stages(case)[rank :: case.pp]


def pipeline_of(case: Case) -> Pipeline:
    """The shape of the case's pipeline, as its schedule orders it."""
    return Pipeline(schedule=case.schedule, pp=case.pp, micro=case.micro, chunks=case.chunks, group=case.group or None)


def _stage(case: Case, rank: int, chunk: int) -> Stage:
    group = PipelineGroup(ranks=tuple(range(case.pp)), chunks=case.chunks)
    layers = group.layers(case.layers, rank, chunk, first=case.first_layers or None, last=case.last_layers or None)
    return Stage(
        index=group.virtual_stage(rank, chunk), count=case.pp * case.chunks, pp=case.pp, layers=layers, tied=case.tied
    )
