"""Pipeline stages: consecutive layers, the embedding on the first, final norm, head and loss on the last.

A rank holds one stage, or one for each of its chunks: stage k*pp + r is chunk k of rank r. Names are those of the whole
model: stage 1 of two holds `layers.2`, not a `layers.0` of its own. With tied embeddings the last stage holds a copy of
the token table for its head, under the table's name. Without a pipeline the one stage is the whole model.

Which layers of a stage backward computes again, and which of them together, as one unit:

    recompute_method=uniform    all layers, in units of recompute_layers; a unit saves its input alone
    recompute_method=block      the first recompute_layers layers of every stage, each a unit; the others save all

Sources: Megatron-Core 0.16.1 `transformer_layer.py`: get_transformer_layer_offset, `parallel_state.py` (around.md
13.5), `TransformerBlock._checkpointed_forward` (around.md 16); InternEvo recomputes the first layers, too
(`model.checkpoint`, a share of them).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from shardproof.parallel.schedules.pipeline import Pipeline
from shardproof.reference.case import Case
from shardproof.reference.groups import PipelineGroup

TABLE = "embedding.tokens.weight"
"""The parameter that the first and the last stage hold when embeddings are tied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A stage of `count` on this many ranks: its layers by number, and whether the last stage reads the token table.

    A tied head reads the table, and so does a module that embeds behind the decoder.
    """

    index: int
    count: int
    ranks: int
    layers: range
    reads_table: bool

    @property
    def at(self) -> Mapping[str, int]:
        """Its rank's place on the mesh, as a term has it; nothing where there is one stage."""
        return {"pp": self.rank} if self.ranks > 1 else {}

    @property
    def rank(self) -> int:
        """The place in the pipeline of the rank that holds it."""
        return self.index % self.ranks

    @property
    def chunk(self) -> int:
        """Which chunk of its rank it is."""
        return self.index // self.ranks

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
        return self.last and not self.first and self.reads_table

    @property
    def shares_table(self) -> bool:
        """Whether its token table is that of another stage too."""
        return self.copies_table or (self.first and not self.last and self.reads_table)

    def holds(self, name: str) -> bool:
        """Whether the parameter or module of this dotted name is here."""
        first, number, *_ = [*name.split("."), ""]
        if first == "layers":
            return int(number) in self.layers
        if first == "embedding":
            return self.first or (self.copies_table and name.startswith(TABLE.removesuffix(".weight")))
        return self.last


@lru_cache(maxsize=16)
def stages(case: Case) -> tuple[Stage, ...]:
    """All stages of a case, in the order in which a micro-batch passes them."""
    return tuple(_stage(case, rank, chunk) for chunk in range(case.chunks) for rank in range(case.pp))


def stages_of_rank(case: Case, rank: int) -> tuple[Stage, ...]:
    """The stages of the rank at this place of a pipeline, chunk by chunk."""
    return stages(case)[rank :: case.pp]


def held_by_rank(case: Case) -> tuple[tuple[Stage, ...], ...]:
    """The stages of every rank of a pipeline."""
    return tuple(stages_of_rank(case, rank) for rank in range(case.pp))


def held_at(case: Case, at: Mapping[str, tuple[int, int]]) -> tuple[Stage, ...]:
    """The stages of the rank at these coordinates, mesh axis -> (place, ranks)."""
    return stages_of_rank(case, at["pp"][0])


def pipeline_of(case: Case) -> Pipeline:
    """The shape of the case's pipeline, as its schedule orders it."""
    return Pipeline(
        schedule=case.schedule, ranks=case.pp, micro=case.micro, chunks=case.chunks, group=case.group or None
    )


def _stage(case: Case, rank: int, chunk: int) -> Stage:
    group = PipelineGroup(ranks=tuple(range(case.pp)), chunks=case.chunks)
    layers = group.layers(case.layers, rank, chunk, first=case.first_layers or None, last=case.last_layers or None)
    return Stage(
        index=group.virtual_stage(rank, chunk),
        count=case.pp * case.chunks,
        ranks=case.pp,
        layers=layers,
        reads_table=case.tied or case.embeds_behind,
    )


def units(case: Case, layers: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The units among these consecutive layers, which are all of a stage's, in their order."""
    if not case.layers_again:
        return ()
    size = case.recompute_layers
    if case.recompute_method == "block":
        return tuple((layer,) for layer in layers[:size])
    return tuple(tuple(layers[first : first + size]) for first in range(0, len(layers), size))


def computed_again(case: Case) -> frozenset[int]:
    """The numbers of all layers that are computed again, on whatever stage."""
    return frozenset(layer for stage in stages(case) for unit in units(case, stage.layers) for layer in unit)


def modules_again(case: Case) -> tuple[str, ...]:
    """The modules that backward computes again: layers, and units behind the decoder."""
    return (*(f"layers.{layer}" for layer in computed_again(case)), *(case.units_behind if case.layers_again else ()))


def lies_in(module: str, units: Iterable[str]) -> bool:
    """Whether a module is one of these, or inside of one."""
    return any(f"{module}.".startswith(f"{unit}.") for unit in units)


def ends_of_units(case: Case) -> frozenset[int]:
    """The numbers of the last layers of all units."""
    return frozenset(unit[-1] for stage in stages(case) for unit in units(case, stage.layers))


def in_backward(case: Case, layers: Sequence[int]) -> tuple[int, ...]:
    """These layers, which are all of a stage's, as backward comes to them: those of a unit from its first one on."""
    made = units(case, layers)
    rest = layers[sum(map(len, made)) :]
    return (*reversed(rest), *(layer for unit in reversed(made) for layer in unit))
