"""Groups of ranks: rank orders, a layout of several over the same ranks, a pipeline. No torch is loaded.

orders      ranks numbered by axes, fastest first              `RankOrder`
            the rank orders of one system over the same ranks  `Layout`
pipelines   stages, chunks, neighbours, layers                 `PipelineGroup`
"""

from shardproof.reference.groups.orders import Groups, Layout, RankOrder
from shardproof.reference.groups.pipelines import PipelineGroup

__all__ = ["Groups", "Layout", "PipelineGroup", "RankOrder"]
