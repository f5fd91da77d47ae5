"""A pipeline: the ranks of one pp group in order, the model chunks of each, and what a stage of it holds.

With v chunks a rank, chunk k of stage r is virtual stage k*P + r of P*v: chunk after chunk around the ranks.
Sources: Megatron-Core `parallel_state.py` (is_pipeline_first_stage and its neighbours, default_embedding_ranks),
`transformer_layer.py`: get_transformer_layer_offset, `multi_token_prediction.py`: get_mtp_ranks; Megatron-LM
`pretrain_gpt.py`: get_embedding_ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from reference.errors import CaseError
from reference.groups.orders import check_size


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineGroup:
    """A pipeline: `ranks` are global ranks, stage by stage; each holds `chunks` chunks of the model.

    Raises CaseError for no ranks, and for more than one chunk on a single stage.
    """

    ranks: tuple[int, ...]
    chunks: int = 1

    def __post_init__(self) -> None:
        check_size("pp", len(self.ranks))
        check_size("chunks", self.chunks)
        if self.chunks > 1 and len(self.ranks) == 1:
            raise CaseError("chunks", self.chunks, "more than one chunk needs pp of at least 2", "chunks=1")

    def stage(self, rank: int) -> int:
        """The stage of a global rank, 0 for the first. Raises CaseError for a rank outside this pipeline."""
        if rank not in self.ranks:
            raise CaseError("rank", rank, "is not in this pipeline", " ".join(map(str, self.ranks)))
        return self.ranks.index(rank)

    def virtual_stage(self, rank: int, chunk: int) -> int:
        """The place of a chunk in the whole model. Raises CaseError for an unknown rank or chunk."""
        if not 0 <= chunk < self.chunks:
            raise CaseError("chunk", chunk, f"must be one of {self.chunks} chunks", f"0..{self.chunks - 1}")
        return chunk * len(self.ranks) + self.stage(rank)

    def first_stage(self, rank: int, chunk: int | None = None) -> bool:
        """Whether a rank is the first stage, in any of its chunks; with `chunk`, whether that chunk starts the model.

        Raises CaseError for an unknown rank or chunk.
        """
        return self.stage(rank) == 0 if chunk is None else self.virtual_stage(rank, chunk) == 0

    def last_stage(self, rank: int, chunk: int | None = None) -> bool:
        """Whether a rank is the last stage, in any of its chunks; with `chunk`, whether that chunk ends the model.

        Raises CaseError for an unknown rank or chunk.
        """
        if chunk is None:
            return self.stage(rank) == len(self.ranks) - 1
        return self.virtual_stage(rank, chunk) == self._last

    def next_rank(self, rank: int) -> int:
        """The rank of the next stage, after the last stage the first: interleaved schedules send there.

        Raises CaseError for an unknown rank.
        """
        return self.ranks[(self.stage(rank) + 1) % len(self.ranks)]

    def previous_rank(self, rank: int) -> int:
        """The rank of the stage before, before the first stage the last. Raises CaseError for an unknown rank."""
        return self.ranks[self.stage(rank) - 1]

    def layers(
        self, count: int, rank: int, chunk: int = 0, *, first: int | None = None, last: int | None = None
    ) -> range:
        """The numbers of the layers, of `count` in all, that a chunk of a rank holds.

        `first` and `last` are the layers of the first and the last stage in all their chunks; the other stages share
        the rest equally. Raises CaseError for layers that cannot be shared so.
        """
        counts = self._layer_counts(count, first, last)
        stage = self.virtual_stage(rank, chunk) % len(self.ranks)
        start = (chunk * count + sum(counts[:stage])) // self.chunks
        return range(start, start + counts[stage] // self.chunks)

    def embedding_ranks(self, *, tied: bool = True, prediction: Iterable[int] = ()) -> tuple[int, ...]:
        """The ranks that hold the word embedding, in ascending order: its gradient is summed over them.

        These are the first stage, the last if its head is tied to the embedding, and the virtual stages with
        multi-token prediction layers. Prediction layers embed tokens again. Raises CaseError for an unknown one.
        """
        return tuple(sorted({self.ranks[stage % len(self.ranks)] for stage in self._embedding(tied, prediction)}))

    def holds_embedding(
        self, rank: int, chunk: int | None = None, *, tied: bool = True, prediction: Iterable[int] = ()
    ) -> bool:
        """Whether a rank holds the word embedding, in any of its chunks; with `chunk`, whether that chunk does.

        Megatron-Core's is_rank_in_embedding_group knows the first and the last stage alone. There every chunk of a
        stage between is in the group, and a last member that is not the last stage is not. Raises CaseError for an
        unknown rank, chunk or virtual stage.
        """
        if chunk is None:
            self.stage(rank)
            return rank in self.embedding_ranks(tied=tied, prediction=prediction)
        return self.virtual_stage(rank, chunk) in self._embedding(tied, prediction)

    def position_embedding_ranks(self) -> tuple[int, ...]:
        """The ranks that hold the position embedding: the first stage alone, so that it is never summed."""
        return self.ranks[:1]

    def prediction_stage(self) -> int:
        """The virtual stage of multi-token prediction layers where no layout of layers is given: the last."""
        return self._last

    @property
    def _last(self) -> int:
        return len(self.ranks) * self.chunks - 1

    def _embedding(self, tied: bool, prediction: Iterable[int]) -> set[int]:
        """The virtual stages that hold the word embedding."""
        found = {0, *prediction} | ({self._last} if tied else set())
        for stage in found:
            if not 0 <= stage <= self._last:
                raise CaseError(
                    "prediction", stage, f"must be one of {self._last + 1} virtual stages", f"0..{self._last}"
                )
        return found

    def _layer_counts(self, count: int, first: int | None, last: int | None) -> list[int]:
        """Layers of each stage in all its chunks."""
        stages, chunks = len(self.ranks), self.chunks
        given = {"first_layers": first, "last_layers": last}
        for field, layers in given.items():
            if layers is None:
                continue
            check_size(field, layers)
            if stages == 1:
                raise CaseError(field, layers, "needs pp of at least 2", "pp=2")
            if layers % chunks:
                raise CaseError(field, layers, f"must be a multiple of chunks={chunks}", f"{field}={chunks}")
        ends, others = (
            sum(layers or 0 for layers in given.values()),
            stages - len(given) + [*given.values()].count(None),
        )
        unit = others * chunks
        if (count - ends) % unit if unit and count >= ends else count != ends:
            of_chunks = f" of {chunks} chunks" if chunks > 1 else ""
            rule = f"must share evenly over {stages} stages{of_chunks}, unless first_layers= or last_layers= is given"
            if ends:
                rule = f"must leave first_layers + last_layers = {ends} and a multiple of {unit}"
            raise CaseError("layers", count, rule, f"layers={ends + max((count - ends) // (unit or 1), 1) * unit}")
        middle = (count - ends) // max(others, 1)
        counts = [middle] * stages
        if first is not None:
            counts[0] = first
        if last is not None:
            counts[-1] = last
        return counts
