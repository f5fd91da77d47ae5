"""The axis of a group: by what the program called it, else by its ranks, and what is not certain of it."""

import pytest

from harness.protocols import Axes
from harness.recording.naming import axis_name

AXES = {"tp": ((0, 1), (2, 3)), "dp": ((0, 2), (1, 3)), "pp": ((0,), (1,), (2,), (3,))}


EXPERTS = {
    "tp": ((0, 1), (2, 3), (4, 5), (6, 7)),
    "cp": tuple((rank,) for rank in range(8)),
    "dp": ((0, 2), (1, 3), (4, 6), (5, 7)),
    "pp": ((0, 4), (1, 5), (2, 6), (3, 7)),
    "etp": tuple((rank,) for rank in range(8)),
    "ep": ((0, 1), (2, 3), (4, 5), (6, 7)),
    "edp": ((0, 2), (1, 3), (4, 6), (5, 7)),
}
"""tp=2 dp=2 pp=2 ep=2 etp=1: groups of Megatron-Core and meshes of torchtitan, worked out by hand."""


KNOWN = [
    ((0, 2), "mesh_dp", "dp"),
    ((0, 1, 2, 3), "default_pg", "world"),
    ((0, 3), "undefined", "0,3"),
    ((2,), "undefined", "2"),
    ((2,), "pp", "pp"),
    ((0, 1), "TENSOR_MODEL_PARALLEL_GROUP", "tp"),
    ((0, 2), "TENSOR_MODEL_PARALLEL_GROUP", "tp"),  # the check of groups compares the ranks
    ((0, 1), "EXPERT_MODEL_PARALLEL_GROUP", "ep"),
    ((0, 1), "experts", "ep"),
    ((0, 2), "EXPERT_DATA_PARALLEL_GROUP_GLOO", "edp"),
    ((0, 2), "DATA_PARALLEL_GROUP_WITH_CP", "dp"),
    ((0, 1), "DATA_PARALLEL_GROUP_WITH_CP", "dp_cp"),
    ((0, 1), "mesh_dp_shard", "dp_shard"),
    ((0, 2), "mesh_dp_shard", "dp"),
    ((0, 1, 2, 3), "MODEL_PARALLEL_GROUP", "tp_pp"),
    ((0, 1), "PIPELINE_MODEL_PARALLEL_GROUP", "pp"),
    ((0, 3), "EMBEDDING_GROUP", "embedding"),
    ((0, 3), "mesh_stages", "stages"),
]
SPLIT = [
    ((0, 1, 4, 5), "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP_WITH_EGTP", "ep_pp"),
    ((2, 3), "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP", "ep"),
    ((2,), "EXPERT_TENSOR_PARALLEL_GROUP", "etp"),
    ((1, 3), "EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT", "edp"),
    ((0, 1), "TENSOR_AND_CONTEXT_PARALLEL_GROUP", "tp"),
    ((1, 3), "DATA_PARALLEL_GROUP_WITH_CP_AG", "dp"),
    ((1,), "INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP", "intra_dp_cp"),
    (tuple(range(8)), "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP", "tp_dp_pp"),
    ((0, 2), "mesh_batch", "dp"),
    ((0, 2), "mesh_loss_mesh", "dp"),
    ((0, 2), "mesh_dp_shard_cp", "dp"),
    ((0, 2), "mesh_efsdp", "edp"),
    ((0, 3), "mesh_batch", "dp"),  # other ranks than the axis has: the check of groups tells
    ((0, 3), "DATA_LOADER_QUEUE", "dp_loader_queue"),
    ((0, 3), "data_loader", "data_loader"),
]
WITHOUT_A_CASE = [
    ("EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP_WITH_EGTP", "etp_ep_pp_egtp"),
    ("TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP", "tp_dp_cp"),
    ("mesh_loss_mesh", "dp_cp"),
    ("mesh_fsdp", "dp_shard_cp"),
]


@pytest.mark.parametrize(
    ("axes", "group", "desc", "name"),
    [
        *((AXES, *row) for row in KNOWN),
        *((EXPERTS, *row) for row in SPLIT),
        *(({}, (0, 3), *row) for row in WITHOUT_A_CASE),
    ],
)
def test_a_group_is_named_by_its_description_whatever_axes_have_the_same_ranks_else_by_its_ranks(
    axes: Axes, group: tuple[int, ...], desc: str, name: str
) -> None:
    assert axis_name(group, desc, axes, 4 if axes is AXES else 8) == (name, "")


@pytest.mark.parametrize(
    ("group", "desc", "why"),
    [((3, 1), "undefined", "its group has no description"), ((0, 2), "mesh_lanes", "is described as 'mesh_lanes'")],
)
def test_an_axis_that_the_ranks_alone_name_is_a_doubt(group: tuple[int, ...], desc: str, why: str) -> None:
    name, doubt = axis_name(group, desc, AXES, 4)
    assert name == "dp"
    assert doubt.startswith("axis dp: ") and why in doubt


def test_a_rank_list_that_two_axes_share_names_none_and_all_ranks_of_one_axis_name_it() -> None:
    assert axis_name((0, 1), "default_pg", {"dp": ((0, 1),), "tp": ((0,), (1,))}, 2) == ("dp", "")
    assert axis_name((0, 1), "undefined", {"dp": ((0, 1),)}, 2)[1] != ""
    shared = {"tp": ((0, 1),), "wp": ((0, 1),)}
    assert axis_name((0, 1), "default_pg", shared, 2) == ("world", "")
    assert axis_name((0, 1), "wp", shared, 2) == axis_name((0, 1), "mesh_wp", shared, 2) == ("wp", "")
    assert axis_name((0, 1), "", shared, 4) == ("0,1", "")
