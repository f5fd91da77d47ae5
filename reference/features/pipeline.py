"""Pipeline parallelism: the axis `pp`, whose ranks hold consecutive layers. Its words and what makes them legal.

Ranks share layers as in Megatron-Core: those of the first and the last rank where they are stated, the rest evenly.
Each rank splits its own evenly over its chunks. The interleaved schedule runs groups of micro-batches, none smaller
than pp. Where weights have ranks of their own (isp), these are of one stage, as in InternEvo's orders.
"""

from collections.abc import Iterator
from dataclasses import replace

from shardproof.reference.errors import CaseError
from shardproof.reference.language.core import Core, whose
from shardproof.reference.language.groups import Groups, Layout, PipelineGroup
from shardproof.reference.language.words import Problem, declared_words, not_default, word

_LAYERS = "0, or at least 1"


class PipelineParallel(Core):
    """A case with pipeline stages."""

    pp: int = word(1, "pipeline stages: each holds consecutive layers", domain=(1, 2), after="dp", axis=50)
    schedule: str = word(
        "1f1b",
        "order of forwards and backwards on a pipeline stage (pp above 1)",
        legal=("gpipe", "1f1b", "interleaved"),
        after="order",
    )
    chunks: int = word(1, "chunks of the model on every pipeline rank (schedule=interleaved)", domain=(1, 2))
    group: int = word(
        0,
        "micro-batches in a row on each chunk (schedule=interleaved); 0: pp",
        legal="0, or from pp to micro",
        domain=(0, 3),
    )
    first_layers: int = word(
        0, "layers of the first pipeline rank; 0: as many as the others", legal=_LAYERS, domain=(0, 1)
    )
    last_layers: int = word(
        0, "layers of the last pipeline rank; 0: as many as the others", legal=_LAYERS, domain=(0, 1)
    )

    @property
    def pipeline_axes(self) -> tuple[str, ...]:
        """The mesh axis over which the layers are split; none with one stage."""
        return ("pp",) if self.pp > 1 else ()

    @property
    def pipeline(self) -> PipelineGroup:
        """The places of a pipeline, each with its chunks. Raises CaseError for several chunks with pp=1."""
        return PipelineGroup(ranks=tuple(range(self.pp)), chunks=self.chunks)

    @property
    def table_is_copied(self) -> bool:
        """Whether the first and the last stage both hold the token table.

        The first has it for the embedding, the last for the head, or for what embeds behind the decoder.
        """
        return self.pp > 1 and (self.tied or self.embeds_behind)

    @property
    def stage_layers(self) -> tuple[tuple[range, ...], ...]:
        """The numbers of the layers of every pipeline rank, chunk by chunk.

        Raises CaseError for layers that the ranks and their chunks cannot share.
        """
        ends = {"first": self.first_layers or None, "last": self.last_layers or None}
        group = self.pipeline
        return tuple(
            tuple(group.layers(self.layers, rank, chunk, **ends) for chunk in range(self.chunks))
            for rank in range(self.pp)
        )

    @property
    def layout(self) -> Layout:
        """The rank orders, with gathered weights on the ranks of one stage."""
        layout = super().layout
        if self.pp == 1 or not self.system.gathers_weights:
            return layout
        ranks, weights, *others = layout.orders
        sizes = {**weights.sizes, "wdp": weights.sizes["wdp"] // self.pp, "pp": self.pp}
        return replace(layout, orders=(ranks, replace(weights, axes=tuple(sizes.items())), *others))

    @property
    def axes(self) -> dict[str, Groups]:
        """The groups of ranks, with `embedding` for a copied token table: the first and the last stage."""
        lists = super().axes
        if self.table_is_copied:
            lists["embedding"] = tuple(PipelineGroup(ranks=ranks).embedding_ranks() for ranks in lists["pp"])
        return lists

    def problems(self) -> Iterator[Problem]:
        """Every broken rule: its word, the rule and a legal value."""
        for key in ("first_layers", "last_layers"):
            if getattr(self, key) < 0:
                yield key, "must not be negative", f"{key}=0"
        if self.pp == 1:
            for key, legal in not_default(PipelineParallel, self):
                yield key, "is for several pipeline stages, and pp=1 has one", legal
            return
        if not self.system.stages:
            rule = "runs whole models, as DeepSpeed's inference does"
            yield "pp", f"mode={self.mode} {rule}; pipelines run mode={whose(lambda one: one.stages)}", "pp=1"
        words = self.order.lower().split("-")
        if self.system.gathers_weights and "pp" in words[:-1]:
            rule = f"must end in pp: mode={self.mode} splits the weights of a stage over neighbouring ranks"
            yield "order", rule, f"order={'-'.join([*(word for word in words if word != 'pp'), 'pp'])}"
        yield from self._chunks()
        try:
            without = [rank for rank, chunks in enumerate(self.stage_layers) if not chunks[0]]
        except CaseError as error:
            yield error.key, error.rule, error.legal
            return
        if without:
            rule = f"leaves none to pipeline ranks {without} of pp={self.pp}"
            yield "layers", rule, f"layers={self.layers + self.chunks * len(without)}"

    def _chunks(self) -> Iterator[Problem]:
        """Megatron-Core's rules: pp <= group <= micro, and the last group is no smaller than pp."""
        pp, micro, group = self.pp, self.micro, self.group or self.pp
        if self.schedule != "interleaved":
            for key in ("chunks", "group"):
                if getattr(self, key) != (plain := declared_words(PipelineParallel)[key].default):
                    yield key, f"is for schedule=interleaved, not for schedule={self.schedule}", f"{key}={plain}"
            return
        if self.chunks < 2:
            yield "chunks", "schedule=interleaved needs at least two chunks on every rank", "chunks=2"
        if micro < pp:
            yield "micro", f"schedule=interleaved needs at least pp={pp} micro-batches", f"micro={pp}"
        elif not pp <= group <= micro:
            yield "group", f"must be from pp={pp} to micro={micro}", "group=0"
        elif 0 < micro % group < pp:
            rule = f"the last group would have {micro % group} micro-batches, fewer than pp={pp} (group={group})"
            yield "micro", rule, f"micro={micro - micro % group}"
