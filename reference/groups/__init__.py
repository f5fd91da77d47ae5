"""Which ranks make a group: rank orders, the layouts of real systems, the stages of a pipeline. It loads no torch.

orders      ranks numbered by axes, fastest first                      `RankOrder`, `levels`, `hybrid`
layouts     the rank orders of one system over the same ranks          `Layout`
systems     those of Megatron-Core, InternEvo, picotron, torchtitan    `megatron`, `internevo`, ...
pipelines   stages, chunks, neighbours, layers, embedding groups       `PipelineGroup`
"""

from reference.groups.layouts import Layout
from reference.groups.orders import Groups, RankOrder, hybrid, levels
from reference.groups.pipelines import PipelineGroup
from reference.groups.systems import internevo, megatron, picotron, torchtitan

__all__ = [
    "Groups",
    "Layout",
    "PipelineGroup",
    "RankOrder",
    "hybrid",
    "internevo",
    "levels",
    "megatron",
    "picotron",
    "torchtitan",
]
