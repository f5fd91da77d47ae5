"""A pipeline: the ranks of one pp group in order, the model chunks of each, and what a stage of it holds.

With v chunks a rank, chunk k of stage r is virtual stage k*P + r of P*v: chunk after chunk around the ranks.
Sources: Megatron-Core `parallel_state.py` (default_embedding_ranks), `transformer_layer.py`:
get_transformer_layer_offset.
"""

from dataclasses import dataclass

from shardproof.reference.errors import CaseError
from shardproof.reference.groups.orders import check_size


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

    def embedding_ranks(self) -> tuple[int, ...]:
        """The ranks that hold a tied word embedding, the first and the last stage: its gradient is summed over them."""
        return tuple(sorted({self.ranks[0], self.ranks[-1]}))

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
