"""The pipeline of a case as `predict` reads it: which stages are alike, and what each does in a step."""

from dataclasses import dataclass

from shardproof.parallel.schedules.messages import Program, programs
from shardproof.parallel.schedules.pipeline import bubble_stated
from shardproof.parallel.schedules.stages import Stage, held_by_rank, pipeline_of
from shardproof.reference.case import Case


@dataclass(frozen=True, slots=True, kw_only=True)
class CasePipeline:
    """The pipeline of a case with several stages."""

    case: Case

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers of every rank, all chunks together."""
        return tuple(sum(len(stage.layers) for stage in own) for own in held_by_rank(self.case))

    @property
    def chunks(self) -> int:
        """The chunks of layers of every stage."""
        return pipeline_of(self.case).chunks

    @property
    def alike(self) -> tuple[int, ...]:
        """Rank -> the first rank that has as many layers of every kind and the same ends of the model."""
        ranks = held_by_rank(self.case)
        kinds = [[(stage.first, stage.last, self._kinds(stage)) for stage in own] for own in ranks]
        return tuple(kinds.index(kind) for kind in kinds)

    def _kinds_of_ranks(self) -> list[set[tuple[str, ...]]]:
        return [{kind for stage in own for kind in self._kinds(stage)} for own in held_by_rank(self.case)]

    def _kinds(self, stage: Stage) -> list[tuple[str, ...]]:
        """Kinds of branches in the place of attention and MLP in each of its layers."""
        return [tuple(sorted(self.case.replaced(layer).values())) for layer in stage.layers]

    @property
    def programs(self) -> tuple[Program, ...]:
        """Programs of all stages in a step."""
        return programs(pipeline_of(self.case))

    @property
    def bubble_stated(self) -> float | None:
        """Closed form of the share of time in which stages wait, None where none is known."""
        stated = bubble_stated(pipeline_of(self.case))
        return None if stated is None else float(stated)

    def sample(self, depth: int | None) -> Case:
        """A step of few micro-batches: two, three where the case has more, or whole groups of them.

        `depth` is the layers of every chunk, unless some rank then lacks a kind of layer that it has, or gets another.
        """
        case, pipeline = self.case, pipeline_of(self.case)
        few, group = max(2, min(3, case.micro)), pipeline.in_a_row if self.chunks > 1 else 1
        short = {"steps": 1, "micro": -(-few // group) * group}
        if depth is None:
            return case.but(**short)
        each = depth * self.chunks
        ends = {"first_layers": each * bool(case.first_layers), "last_layers": each * bool(case.last_layers)}
        made = case.but(**short, **ends, layers=each * pipeline.ranks)
        return made if CasePipeline(case=made)._kinds_of_ranks() == self._kinds_of_ranks() else case.but(**short)
