"""Mesh axes that the harness knows by name: those of a case in a subject's own words, of a pipeline, of slices."""

from collections.abc import Mapping

from shardproof.harness.protocols import Axes, CaseLike

AXES = ("tp", "cp", "dp", "pp")
"""Mesh axes, fastest first, as in Megatron: ranks of one tp group are neighbours. An axis not stated is 1."""
EXPERT_AXES = ("etp", "ep")
"""Axes of a case if `subject.words` names them: how expert layers are split over the ranks of tp, cp and dp.

Ranks of one etp group are neighbours, then ep, then `edp`, the ranks that hold the same experts, then pp, as in
Megatron-Core and torchtitan. Without the word, etp is tp (as in Megatron-Core) and ep is 1.
"""
SHOWN = ("tp", "wp", "cp", "cp_inner", "cp_outer", "dp", "dp_cp", "wdp", "etp", "ep", "edp", "pp", "world")
"""The order of axes in tables; others follow."""
PIPELINE, SLICES = "pp", "cp"
"""The axis of the stages of a model, and the axis of the slices of a sequence."""
SAME_SAMPLES = (SLICES, PIPELINE)
"""Axes whose ranks see the same samples: slices of rows, stages of layers."""
WITH_EXPERTS_APART = tuple(axis for axis in AXES if axis != PIPELINE)
"""Axes over whose ranks experts are split in another way."""
SPELT: Mapping[str, str] = {
    "intra distributed optimizer instance": "intra tp cp dp pp",
    "expert tensor model pipeline": "etp ep pp",
    "expert tensor model": "etp ep",
    "expert tensor": "etp",
    "expert model": "ep",
    "expert data": "edp",
    "tensor model": "tp",
    "pipeline model": "pp",
    "expert": "ep",
    "experts": "ep",
    "tensor": "tp",
    "data": "dp",
    "context": "cp",
    "pipeline": "pp",
    "pipe": "pp",
    "stage": "pp",
    "model": "tp pp",
    "embd": "embedding",
    "batch": "dp",
    "loss mesh": "dp cp",
    "loss": "dp cp",
    "fsdp": "dp shard cp",
    "efsdp": "edp",
}
"""Words of Megatron-Core (parallel_state.initialize_model_parallel), without fillers, and of torchtitan's meshes
(distributed.parallel_dims) -> the axes that they stand for. Words for more axes come first.
"""
KNOWN = frozenset((*AXES, *EXPERT_AXES, "edp", "wp", "wdp", "embedding"))
"""Axes that a description may name directly."""


def pipelines(axes: Axes) -> tuple[tuple[int, ...], ...]:
    """The ranks of every pipeline, stage by stage; empty without that axis."""
    return tuple(tuple(ranks) for ranks in axes.get(PIPELINE, ()))


def stage_count(axes: Axes) -> int:
    """The number of stages of a pipeline, 1 without any."""
    return max(map(len, pipelines(axes)), default=1)


def first_pipeline(axes: Axes) -> tuple[int, ...]:
    """The pipeline of rank 0, stage by stage."""
    return next((ranks for ranks in pipelines(axes) if 0 in ranks), (0,))


def place_of_rank(axes: Axes, axis: str, rank: int) -> int:
    """The place of a rank in its group along an axis; 0 if there is no such axis."""
    return next((ranks.index(rank) for ranks in axes.get(axis, ()) if rank in ranks), 0)


def split_axes(case: CaseLike) -> dict[str, int]:
    """Axes of the case's mesh with a size above 1: name -> size."""
    sizes = {axis: max((len(ranks) for ranks in lists), default=1) for axis, lists in case.axes.items()}
    return {axis: size for axis, size in sizes.items() if size > 1}
